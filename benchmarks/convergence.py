"""Does training under a budget converge as plain training does? (The paper's Fig. 15.)

    python benchmarks/convergence.py --out results.json
    python benchmarks/convergence.py --figures      # draws the newest results; measures nothing

A BERT-like encoder learns to tell the topic of texts that this script makes: a share of a text's
words come from its topic's own, the others from all. Lengths are mixed, a batch is padded to its
longest. Three epochs with AdamW and dropout, the rate falling linearly, at the rates that the
paper's code has for its tasks: plain training, every block through `torch.utils.checkpoint`, and
mimose under a budget that plain training exceeds on half of the steps. With deterministic
algorithms losses, weights and held-out accuracy must be the same, bit for bit; without, as is
PyTorch's default, kernels that add up in any order differ from run to run.

Each run has a process of its own. They share the device, since no time is measured.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mimose
from common import circumstances, parser_of, save
from mimose.interception import find_blocks
from mimose.memory import meter_for
from raw_files import RESULTS, newest
from tables_of_training import ends

WAYS = ("plain", "torch-all", "mimose")
RATES = (5e-5, 3e-5, 2e-5)
"""Of multiple choice, of question answering, of classification."""
EPOCHS = 3
FLOOR_MARGIN = 1.13
"""A budget leaves the reserve (8 % at first) free above what recomputing everything needs."""


@dataclass(frozen=True)
class Setting:
    """The model, and the texts that it learns from."""

    width: int = 768
    layers: int = 8
    heads: int = 12
    batch: int = 16
    batches: int = 100
    """In an epoch."""
    shortest: int = 24
    longest: int = 320
    words: int = 4096
    topics: int = 4
    words_of_topic: int = 8
    share: float = 0.3
    """Of a text's words that are its topic's."""


SMALL = Setting(width=64, layers=4, heads=4, batches=30, shortest=6, longest=40, words=512)
"""For a try on a CPU, with a rate of 1e-3."""


@dataclass(frozen=True)
class Job:
    """One run."""

    way: str
    rate: float
    deterministic: bool
    setting: Setting
    budget: int | None = None


@dataclass(frozen=True)
class Text:
    words: list[int]
    topic: int


def texts(setting: Setting, count: int, seed: int) -> list[Text]:
    """Texts of any topic and any length; word 0 is padding, word 1 begins every text."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        topic, length = (
            draw.randrange(setting.topics),
            draw.randint(setting.shortest, setting.longest),
        )
        words = [1, *(_word(setting, topic, draw) for _ in range(length - 1))]
        made.append(Text(words, topic))
    return made


def _word(setting: Setting, topic: int, draw: random.Random) -> int:
    if draw.random() < setting.share:
        return 2 + topic * setting.words_of_topic + draw.randrange(setting.words_of_topic)
    return draw.randrange(2, setting.words)


def batches(setting: Setting, epoch: int, device: str) -> Iterator[dict[str, torch.Tensor]]:
    """The same texts in every epoch, in another order."""
    known = texts(setting, setting.batch * setting.batches, seed=0)
    random.Random(epoch).shuffle(known)
    for first in range(0, len(known), setting.batch):
        yield padded(known[first : first + setting.batch], device)


def padded(group: list[Text], device: str) -> dict[str, torch.Tensor]:
    longest = max(len(text.words) for text in group)
    rows = [text.words + [0] * (longest - len(text.words)) for text in group]
    words = torch.tensor(rows, device=device)
    labels = torch.tensor([text.topic for text in group], device=device)
    return {"input_ids": words, "attention_mask": (words != 0).long(), "labels": labels}


def encoder(setting: Setting, device: str) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=setting.width,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        intermediate_size=4 * setting.width,
        vocab_size=setting.words,
        num_labels=setting.topics,
        attn_implementation="eager",
    )
    return BertForSequenceClassification(config).to(device).train()


def train(job: Job) -> dict[str, Any]:
    """One run, from the first step to the held-out accuracy."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.use_deterministic_algorithms(job.deterministic)
    torch.set_float32_matmul_precision("high")  # TF32, as in `mimose bench`
    meter = meter_for(torch.device(device))
    model = encoder(job.setting, device)
    handle = None
    if job.way == "torch-all":
        for block in find_blocks(model):
            forward = block.module.forward
            block.module.forward = functools.partial(checkpoint, forward, use_reentrant=False)
    elif job.way == "mimose":
        assert job.budget is not None
        handle = mimose.auto_checkpoint(model, job.budget, enforce=device == "cuda")
    losses, peaks = _steps(model, job, device, meter)
    result = {
        **{name: getattr(job, name) for name in ("way", "rate", "deterministic", "budget")},
        "losses": losses,
        "peaks": peaks,
        "weights": digest(model),
    }
    if handle is not None:
        stats = handle.stats()
        result["most_held"] = stats.peak_held_bytes
        result["observed_steps"] = stats.observed_steps
        result["recomputed"] = stats.runs_recomputed / (stats.runs_recomputed + stats.runs_kept)
        handle.detach()
    result["accuracy"] = accuracy(model, job.setting, device)
    meter.close()
    return result


def _steps(model: nn.Module, job: Job, device: str, meter: Any) -> tuple[list[float], list[int]]:
    steps = EPOCHS * job.setting.batches
    optimizer = torch.optim.AdamW(model.parameters(), job.rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses, peaks = [], []
    for epoch in range(EPOCHS):
        for batch in batches(job.setting, epoch, device):
            meter.reset_peak()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            peaks.append(meter.read().peak)
    return [float(loss) for loss in losses], peaks


def digest(model: nn.Module) -> str:
    """A hash of all weights: equal for two models only if every bit is."""
    whole = hashlib.sha256()
    for parameter in model.parameters():
        whole.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


@torch.no_grad()
def accuracy(model: nn.Module, setting: Setting, device: str) -> float:
    """On texts that were not in training."""
    model.eval()
    held_out = texts(setting, 16 * setting.batch, seed=1)
    right = 0
    for first in range(0, len(held_out), setting.batch):
        batch = padded(held_out[first : first + setting.batch], device)
        right += int((model(**batch).logits.argmax(-1) == batch["labels"]).sum())
    return right / len(held_out)


def in_process(job: Job) -> dict[str, Any]:
    """The same in a process of its own; cuBLAS is deterministic only with this variable set."""
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        [sys.executable, __file__, "--job", json.dumps(asdict(job)), "--out", os.devnull],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{job}:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(
        job.way, f"{job.rate:g}", "deterministic" * job.deterministic, summary(result), flush=True
    )
    return result


def summary(run: dict[str, Any]) -> str:
    first, last = ends(run["losses"])
    return f"loss {first:.3f} to {last:.3f}, accuracy {run['accuracy']:.3f}"


def budget_of(plain: dict[str, Any], recomputed: dict[str, Any]) -> int:
    """What plain training exceeds on half of the steps, or what every plan needs."""
    median = math.ceil(statistics.median(plain["peaks"]))
    return max(median, int(FLOOR_MARGIN * max(recomputed["peaks"])))


def compare(setting: Setting, rates: list[float], default_rate: float) -> dict[str, Any]:
    """All runs: first those that need no budget, then mimose's."""
    cases = [(rate, True) for rate in rates] + [(default_rate, False)]
    with ThreadPoolExecutor(8 if torch.cuda.is_available() else 1) as pool:
        others = [Job(way, *case, setting) for case in cases for way in WAYS[:2]]
        runs = list(pool.map(in_process, others))
        budget = budget_of(runs[0], runs[1])
        ours = [Job("mimose", *case, setting, budget) for case in cases]
        runs += pool.map(in_process, ours)
    exceeded = statistics.fmean(peak > budget for peak in runs[0]["peaks"])
    for run in runs:
        run["peak"] = max(run.pop("peaks"))
    return {"budget": budget, "plain_exceeds": exceeded, "runs": runs}


def draw(result: dict[str, Any], path: Path) -> None:
    """The losses of every run, smoothed, one column a rate."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys((run["rate"], run["deterministic"]) for run in result["runs"]))
    figure, axes = pyplot.subplots(
        1, len(kinds), figsize=(3.2 * len(kinds), 3), sharey=True, squeeze=False
    )
    styles = {"plain": ("lightgray", 6.0), "torch-all": ("tab:blue", 3.0), "mimose": ("black", 0.8)}
    for axis, kind in zip(axes[0], kinds, strict=True):
        for run in result["runs"]:
            if (run["rate"], run["deterministic"]) == kind:
                colour, width = styles[run["way"]]
                axis.plot(smooth(run["losses"]), color=colour, linewidth=width, label=run["way"])
        algorithms = "deterministic" if kind[1] else "PyTorch's default"
        axis.set_title(f"rate {kind[0]:g}, {algorithms}", fontsize=9)
        axis.set_xlabel("step")
    axes[0][0].set_ylabel("loss, mean of 10 steps")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def smooth(losses: list[float], few: int = 10) -> list[float]:
    return [statistics.fmean(losses[max(0, k - few + 1) : k + 1]) for k in range(len(losses))]


def main() -> None:
    if sys.argv[1:] == ["--figures"]:
        for path in newest(RESULTS.glob("*-convergence.json")):
            draw(json.loads(path.read_text()), path.with_suffix(".png"))
        return
    parser = parser_of(__doc__)
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--small", action="store_true", help="a small model; for a CPU")
    parser.add_argument("--job", type=json.loads, help="one run, in this process")
    options = parser.parse_args()
    if options.job:
        job = Job(**{**options.job, "setting": Setting(**options.job["setting"])})
        print(json.dumps(train(job)))
        return
    setting = SMALL if options.small else Setting()
    results = {
        "benchmark": "convergence",
        **circumstances(options.allow_dirty),
        "setting": asdict(setting),
        "epochs": EPOCHS,
        **compare(setting, options.rates, options.rates[0]),
    }
    save(results, options.out)


if __name__ == "__main__":
    main()
