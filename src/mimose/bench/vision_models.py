"""The vision models: random weights, full and small. `small` shrinks width and depth."""

from __future__ import annotations

from typing import Any

from torch import nn

from mimose.bench.extras import need
from mimose.bench.images import sides_of_detector
from mimose.bench.models import from_transformers


def swin_tiny(small: bool, attention: str) -> nn.Module:
    shape: dict[str, Any] = {"num_labels": 1000, "attn_implementation": attention}
    if small:
        shape |= {"embed_dim": 16, "depths": (2, 2, 2), "num_heads": (1, 2, 4)}
        shape |= {"window_size": 3, "image_size": 64, "num_labels": 10}
    return from_transformers("SwinForImageClassification", "SwinConfig", shape)


def resnet_50(small: bool, attention: str) -> nn.Module:
    shape: dict[str, Any] = {"num_labels": 1000}
    if small:
        shape |= {"embedding_size": 16, "hidden_sizes": (32, 64), "depths": (2, 2)}
        shape |= {"num_labels": 10}
    return from_transformers("ResNetForImageClassification", "ResNetConfig", shape)


def vit_base(small: bool, attention: str) -> nn.Module:
    shape: dict[str, Any] = {"num_labels": 1000, "attn_implementation": attention}
    if small:
        shape |= {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
        shape |= {"intermediate_size": 64, "image_size": 64, "patch_size": 4, "num_labels": 10}
    return from_transformers("ViTForImageClassification", "ViTConfig", shape)


def faster_rcnn(small: bool, attention: str) -> nn.Module:
    """torchvision's detector with a ResNet-50 and a feature pyramid; a ResNet-18 if small."""
    detection = need("torchvision.models.detection", extra="vision")
    backbones = need("torchvision.models.detection.backbone_utils", extra="vision")
    shorter, longer = sides_of_detector(small)
    backbone = backbones.resnet_fpn_backbone(
        backbone_name="resnet18" if small else "resnet50", weights=None, trainable_layers=5
    )
    fewer: dict[str, Any] = {}
    if small:  # proposals
        fewer = {"rpn_pre_nms_top_n_train": 200, "rpn_post_nms_top_n_train": 100}
        fewer |= {"box_batch_size_per_image": 16}
    made: nn.Module = detection.FasterRCNN(backbone, 91, min_size=shorter, max_size=longer, **fewer)
    return made
