"""Blocks are found by structure, in order of execution, or selected by the user."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import models
from mimose.errors import BlocksError
from mimose.interception.block_names import describe_blocks
from mimose.interception.blocks import find_blocks


def names(model: nn.Module, **selection: Any) -> list[str]:
    return [block.name for block in find_blocks(model, **selection)]


def numbered(prefix: str, count: int = 3) -> list[str]:
    return [f"{prefix}.{index}" for index in range(count)]


BLOCKS = {
    "bert": numbered("bert.encoder.layer"),
    "roberta": numbered("roberta.encoder.layer"),
    "xlnet": numbered("transformer.layer"),
    "gpt2": numbered("transformer.h"),
    "llama": numbered("model.layers"),
    "lora": numbered("base_model.model.model.layers"),
    "t5": numbered("encoder.block") + numbered("decoder.block"),
    "vit": numbered("vit.layers"),
    "swin": numbered("swin.encoder.layers.0.blocks", 2)
    + numbered("swin.encoder.layers.1.blocks", 2),
    "resnet": numbered("resnet.encoder.stages.0.layers", 2)
    + numbered("resnet.encoder.stages.1.layers", 2),
    "encoder": numbered("encoder.layers"),
    "sequential": ["0", "3", "4"],
}


@pytest.mark.parametrize("name", models.ALL)
def test_blocks_of_a_model_are_found(name: str) -> None:
    model, _ = models.ALL[name]()
    assert names(model) == BLOCKS[name]
    assert all(model.get_submodule(b.name) is b.module for b in find_blocks(model))


@pytest.mark.parametrize("name", models.ALL)
def test_blocks_come_in_order_of_execution(name: str) -> None:
    model, batch = models.ALL[name]()
    ran = []
    for block in find_blocks(model):
        block.module.register_forward_hook(lambda *_, of=block.name: ran.append(of))
    models.loss_of(model, batch)
    assert ran == BLOCKS[name]


def conv(width: int, out: int, kernel: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width, out, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(out)
    )


class Bottleneck(nn.Module):
    """Like torchvision's: three convolutions, and a fourth where the shape changes."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, 4, 1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv3, self.bn3 = nn.Conv2d(4, out, 1), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = conv(width, out) if width != out else None


class ResNet(nn.Module):
    """Like torchvision's: stages are attributes, each a `Sequential`."""

    def __init__(self, *depths: int) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 7), nn.BatchNorm2d(8), nn.ReLU()
        width = 8
        for stage, depth in enumerate(depths, 1):
            widths = [width] + [width * 2] * depth
            parts = [Bottleneck(a, b) for a, b in itertools.pairwise(widths)]
            setattr(self, f"layer{stage}", nn.Sequential(*parts))
            width *= 2
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(width, 10)


class FrozenNorm(nn.Module):
    """A BatchNorm with only buffers, as in detectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(width))


class FrozenBasic(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3), FrozenNorm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3), FrozenNorm(width)


class Stage(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FrozenBasic(width) for _ in range(2))


def test_layers_with_frozen_norms_are_found_in_their_stages() -> None:
    model = nn.Module()
    model.stages = nn.ModuleList(Stage(width) for width in (4, 8))
    found = [f"stages.{stage}.layers.{layer}" for stage in range(2) for layer in range(2)]
    assert names(model) == found


def test_stage_of_a_single_bottleneck_is_found_among_longer_ones() -> None:
    assert names(ResNet(1, 2, 1)) == ["layer1.0", "layer2.0", "layer2.1", "layer3.0"]


def test_stages_of_a_single_bottleneck_each_are_found() -> None:
    assert names(ResNet(1, 1, 1)) == ["layer1.0", "layer2.0", "layer3.0"]


class SwinStage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, width) for _ in range(depth)
        )
        self.downsample = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width))


class ConvNeXtStage(nn.Sequential):
    def __init__(self, width: int, depth: int) -> None:
        blocks = (ConvNeXtBlock(width) for _ in range(depth))
        super().__init__(*blocks)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.pwconv1, self.act = nn.Linear(width, 4 * width), nn.GELU()
        self.pwconv2 = nn.Linear(4 * width, width)


class Stages(nn.Module):
    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.LayerNorm(4))
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(8, 2)


def test_blocks_in_nested_stages_are_found() -> None:
    swin = Stages(SwinStage(4, 2), SwinStage(8, 3), SwinStage(16, 1))
    assert names(swin) == [
        *numbered("stages.0.blocks", 2),
        *numbered("stages.1.blocks", 3),
        *numbered("stages.2.blocks", 1),
    ]
    convnext = Stages(ConvNeXtStage(4, 1), ConvNeXtStage(8, 2), ConvNeXtStage(16, 1))
    assert names(convnext) == ["stages.0.0", "stages.1.0", "stages.1.1", "stages.2.0"]


def test_list_of_lists_is_searched_to_its_bottom() -> None:
    groups = (nn.ModuleList(ConvNeXtBlock(4) for _ in range(2)) for _ in range(2))
    assert names(Stages(*groups)) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]


SMALL = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(num_hidden_layers=3, num_key_value_heads=1, num_local_experts=4, **SMALL)
    return MixtralForCausalLM(config)


def deepseek() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    attention = {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    config = DeepseekV3Config(
        num_hidden_layers=3,
        num_key_value_heads=2,
        first_k_dense_replace=1,
        moe_intermediate_size=8,
        v_head_dim=8,
        **attention,
        **experts,
        **SMALL,
    )
    return DeepseekV3ForCausalLM(config)


@pytest.mark.parametrize("make", [mixtral, deepseek])
def test_layers_of_a_mixture_of_experts_are_blocks(make: Any) -> None:
    assert names(make()) == numbered("model.layers")


class MixtureLayer(nn.Module):
    """A layer with a list of experts, each large enough to look like a block."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.experts = nn.ModuleList(ConvNeXtBlock(8) for _ in range(4))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MixtureLayer() for _ in range(3))


def test_experts_in_a_list_are_not_blocks() -> None:
    assert names(Mixture()) == numbered("layers")


def test_shared_layer_is_found() -> None:
    from transformers import AlbertConfig, AlbertModel

    model = AlbertModel(AlbertConfig(embedding_size=8, num_hidden_layers=3, **SMALL))
    assert names(model) == ["encoder.albert_layer_groups.0.albert_layers.0"]


def test_layer_registered_several_times_is_one_block() -> None:
    layer = ConvNeXtBlock(4)
    model = nn.Sequential(layer, ConvNeXtBlock(4), layer)
    assert names(model) == ["0", "1"]
    assert names(nn.ModuleList([layer] * 3)) == ["0"]
    assert names(model, blocks=ConvNeXtBlock) == ["0", "1"]


def test_layer_shared_by_two_stacks_is_the_block_of_the_first() -> None:
    model = nn.Module()
    model.encoder = nn.ModuleList(ConvNeXtBlock(4) for _ in range(2))
    model.decoder = nn.ModuleList([model.encoder[0], ConvNeXtBlock(4), ConvNeXtBlock(4)])
    assert names(model) == ["encoder.0", "encoder.1", "decoder.1", "decoder.2"]


def test_blocks_can_be_chosen_in_every_way() -> None:
    model, _ = models.bert()
    layers = model.bert.encoder.layer
    expected = numbered("bert.encoder.layer")
    assert names(model, blocks="bert.encoder.layer.*[0-9]") == expected
    assert names(model, blocks="bert.encoder.layer.1") == expected[1:2]
    assert names(model, blocks=type(layers[0])) == expected
    assert names(model, blocks=layers[2]) == expected[2:]
    assert names(model, blocks=lambda name, module: module in list(layers)) == expected
    assert names(model, blocks=[layers[2], "bert.encoder.layer.0"]) == [expected[0], expected[2]]
    assert names(model, blocks=(name for name in expected)) == expected


def test_glob_of_a_list_chooses_its_items_and_not_what_is_inside_them() -> None:
    model, _ = models.bert()
    assert names(model, blocks="bert.encoder.layer.*") == numbered("bert.encoder.layer")


def test_blocks_can_be_excluded_in_every_way() -> None:
    model, _ = models.bert()
    layers = model.bert.encoder.layer
    expected = numbered("bert.encoder.layer")
    assert names(model, exclude="bert.encoder.layer.0") == expected[1:]
    assert names(model, exclude="*.2") == expected[:2]
    assert names(model, exclude=layers[1]) == [expected[0], expected[2]]
    assert names(model, exclude=lambda name, module: name.endswith("0")) == expected[1:]
    assert names(model, blocks=type(layers[0]), exclude=[layers[0], layers[2]]) == expected[1:2]


def test_excluding_a_module_excludes_the_blocks_inside_it() -> None:
    layer = nn.TransformerEncoderLayer(8, 2)
    model = nn.ModuleDict({name: nn.TransformerEncoder(layer, 2) for name in ("one", "two")})
    assert names(model, exclude="two") == numbered("one.layers", 2)
    assert names(model, exclude=model["one"].layers) == numbered("two.layers", 2)


@pytest.mark.parametrize("selector", [nn.Linear, "*.linear1", lambda name, module: name == "head"])
def test_excluding_no_block_is_an_error_that_names_the_blocks(selector: Any) -> None:
    model, _ = models.encoder()
    with pytest.raises(BlocksError, match=r"exclude=.* but no block .*encoder\.layers\.0'"):
        find_blocks(model, exclude=selector)


@pytest.mark.parametrize("argument", ["blocks", "exclude"])
def test_an_empty_selector_is_refused(argument: str) -> None:
    model, _ = models.encoder()
    with pytest.raises(BlocksError, match=f"{argument}='' is empty"):
        find_blocks(model, **{argument: ""})


def test_a_module_list_is_refused_as_a_block() -> None:
    model, _ = models.bert()
    with pytest.raises(BlocksError, match=r"bert\.encoder\.layer"):
        find_blocks(model, blocks="bert.encoder.layer")


def test_model_without_blocks_raises_and_shows_how_to_name_them() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    with pytest.raises(BlocksError, match=r"no blocks found in Two.*ModuleList.*blocks=") as raised:
        find_blocks(Two())
    assert isinstance(raised.value, ValueError)
    assert names(Two(), blocks=nn.Linear) == ["first", "second"]


def test_no_blocks_are_explained_truly_for_a_sequential_of_one_layer_with_parameters() -> None:
    with pytest.raises(BlocksError, match="at least two layers that have parameters"):
        find_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


def test_a_list_of_single_layers_is_proposed_by_its_name() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList([nn.LSTM(4, 4) for _ in range(2)])

    with pytest.raises(BlocksError, match=r'that have submodules.* blocks="cells\.\*"'):
        find_blocks(Recurrent())
    assert names(Recurrent(), blocks="cells.*") == ["cells.0", "cells.1"]


@pytest.mark.parametrize("selector", ["*", ["*"], nn.TransformerEncoder])
def test_whole_model_is_refused_as_a_block(selector: Any) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 3)
    with pytest.raises(BlocksError, match=r"selects the whole model: .* such as 'layers\.\*'"):
        find_blocks(encoder, blocks=selector)


@pytest.mark.parametrize(
    ("excluded", "told"),
    [
        ("*.0", "5 blocks layers.1 … layers.5 ("),
        (["*.0", "*.3"], "4 blocks layers.1, layers.2, layers.4, layers.5 ("),
        (["*.0", "*.1", "*.2", "*.3", "*.4"], "1 block layers.5 ("),
    ],
)
def test_blocks_are_described_without_those_that_are_excluded(excluded: Any, told: str) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 6)
    assert describe_blocks(find_blocks(encoder, exclude=excluded)).startswith(told)


@pytest.mark.parametrize("argument", ["blocks", "exclude"])
@pytest.mark.parametrize("selector", ["encoder.layer.9", nn.Conv3d, nn.Linear(1, 1)])
def test_selector_that_matches_nothing_is_an_error_that_shows_names(
    argument: str, selector: Any
) -> None:
    model, _ = models.encoder()
    with pytest.raises(BlocksError, match=rf"{argument}=.*matches no module.*encoder\.layers"):
        find_blocks(model, **{argument: selector})


def test_a_misspelt_name_gets_the_closest_glob_and_each_list_is_named_once() -> None:
    model, _ = models.encoder()
    with pytest.raises(BlocksError, match=r"did you mean 'encoder\.layers\.\*'\? Its") as raised:
        find_blocks(model, blocks="encoder.layer.*")
    assert "layers.0" not in str(raised.value)


@pytest.mark.parametrize("argument", ["blocks", "exclude"])
@pytest.mark.parametrize("selector", [3, [None], ["encoder.layers.0", 1.5]], ids=repr)
def test_an_invalid_selector_is_refused_with_the_valid_kinds(argument: str, selector: Any) -> None:
    model, _ = models.encoder()
    with pytest.raises(BlocksError, match=rf"{argument}=.* is not a selector: give a name or glob"):
        find_blocks(model, **{argument: selector})


def test_excluding_everything_is_an_error() -> None:
    model, _ = models.encoder()
    with pytest.raises(BlocksError, match="excludes every block"):
        find_blocks(model, exclude="encoder.layers.*")


def test_block_inside_a_block_is_refused() -> None:
    model, _ = models.encoder()
    with pytest.raises(BlocksError, match=r"'encoder.layers.0' lies inside block 'encoder'"):
        find_blocks(model, blocks=["encoder", "encoder.layers.0"])
    assert names(model, blocks=["encoder"]) == ["encoder"]


def test_finding_blocks_draws_no_random_numbers_and_changes_nothing() -> None:
    model, _ = models.encoder()
    state, before = torch.get_rng_state(), [dict(module.__dict__) for module in model.modules()]
    find_blocks(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_each_sequential_of_single_layers_is_one_block() -> None:
    def stage(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Conv2d(width, 3, 1))

    model = nn.Module()
    model.first, model.second = stage(4), stage(8)
    assert [block.name for block in find_blocks(model)] == ["first", "second"]


class Mixes(nn.Module):
    """A layer of a hybrid: norms, a mixer and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(4), nn.LayerNorm(4)
        self.mixer = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))


class Attends(Mixes):
    def forward(self, x: torch.Tensor, mask: Any, cache: Any = None) -> None: ...


class Scans(Mixes):
    def forward(self, x: torch.Tensor, mask: Any, cache: Any = None, state: Any = None) -> None: ...


class Pools(Mixes):
    def forward(self, images: torch.Tensor) -> None: ...


def test_layers_of_different_classes_with_similar_arguments_are_blocks() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Attends(), Scans()])
    assert [block.name for block in find_blocks(model)] == ["layers.0", "layers.1"]


def test_parts_with_different_arguments_are_not_blocks() -> None:
    model = nn.Module()
    model.towers = nn.ModuleList([Attends(), Pools()])
    found = [block.name for block in find_blocks(model)]
    assert found == [f"towers.{i}.experts.{j}" for i in (0, 1) for j in (0, 1)]


def test_two_layers_of_a_t5_are_blocks_although_only_the_first_has_a_bias() -> None:
    config = T5Config(
        vocab_size=50, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, num_decoder_layers=2
    )
    found = find_blocks(T5ForConditionalGeneration(config))
    assert [type(block.module).__name__ for block in found] == ["T5Block"] * 4


def test_a_predicate_with_the_wrong_arguments_is_refused_with_an_example() -> None:
    with pytest.raises(BlocksError, match="write blocks=lambda name, module"):
        find_blocks(models.Encoder(), blocks=lambda module: True)  # type: ignore[arg-type, misc]


class DoubleConv(nn.Module):
    """Two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1))


def pair_of_convolutions(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels))


@pytest.mark.parametrize("make", [DoubleConv, pair_of_convolutions])
def test_modules_outside_lists_of_the_same_kind_as_blocks_are_blocks(
    make: Callable[[int], nn.Module],
) -> None:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = make(2)
            self.down = nn.ModuleList(make(2) for _ in range(2))
            self.middle = make(2)
            self.up = nn.ModuleList(make(2) for _ in range(2))
            self.head = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU())

    assert names(UNet()) == ["first", "down.0", "down.1", "middle", "up.0", "up.1"]


def test_a_module_that_contains_blocks_of_its_own_class_is_not_a_block() -> None:
    class Nest(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.linear = nn.Sequential(nn.Linear(2, 2))
            if depth:
                self.inner = nn.ModuleList(Nest(depth - 1) for _ in range(2))

    assert names(nn.ModuleDict({"outer": Nest(1)})) == ["outer.inner.0", "outer.inner.1"]
