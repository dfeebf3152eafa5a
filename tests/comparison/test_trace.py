"""What a trace says of a real step: sizes, aliases, changes in place, lifetimes; and its file."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from mimose.cli.main import main
from mimose.comparison import Call, Constant, Output, Release, Trace, read_trace, record_trace
from mimose.comparison import write_trace as write
from mimose.errors import ArgumentError
from mimose.memory import meter_for
from models import Encoder

FLOAT = 4


def recorded(step: Callable[[], object]) -> Trace:
    return record_trace(step, warm_up_steps=0)


def call_of(trace: Trace, name: str) -> Call:
    (found,) = [call for call in trace.calls if call.name == name]
    return found


def position(trace: Trace, event: object) -> int:
    return trace.events.index(event)  # type: ignore[arg-type]


def test_inputs_are_constants_and_outputs_have_the_bytes_of_their_storage() -> None:
    x = torch.ones(10, 20)
    trace = recorded(lambda: x.exp())
    assert trace.events == (
        Constant(0, 10 * 20 * FLOAT),
        Call("aten.exp.default", trace.calls[0].nanoseconds, (0,), (Output(1, 10 * 20 * FLOAT),)),
        Release(1),
    )
    assert trace.calls[0].nanoseconds > 0


def test_a_view_is_an_alias_without_bytes_of_its_own() -> None:
    x = torch.ones(6)
    trace = recorded(lambda: x.exp().view(2, 3).sum())
    made = call_of(trace, "aten.exp.default").outputs[0].tensor
    (view,) = call_of(trace, "aten.view.default").outputs
    assert (view.size_bytes, view.alias_of) == (0, made)
    assert call_of(trace, "aten.sum.default").inputs == (view.tensor,)


def test_the_same_view_made_twice_is_one_tensor() -> None:
    x = torch.ones(2, 3)
    trace = recorded(lambda: (x.t().exp(), x.t().sin()))
    assert call_of(trace, "aten.exp.default").inputs == call_of(trace, "aten.sin.default").inputs


def test_a_change_in_place_makes_a_tensor_that_replaces_the_old_one() -> None:
    x = torch.ones(8)

    def step() -> torch.Tensor:
        y = x.exp()
        y.add_(1)
        return y.sin()

    trace = recorded(step)
    old = call_of(trace, "aten.exp.default").outputs[0].tensor
    (new,) = call_of(trace, "aten.add_.Tensor").outputs
    assert new == Output(new.tensor, 8 * FLOAT, None, replaces=old)
    assert call_of(trace, "aten.sin.default").inputs == (new.tensor,)
    assert trace.events[position(trace, call_of(trace, "aten.add_.Tensor")) + 1] == Release(old)


def test_a_change_through_a_view_changes_the_tensor_and_all_its_views() -> None:
    x = torch.ones(2, 4)

    def step() -> None:
        y = x.exp()
        row = y[0]
        row.mul_(2)
        y.sin()
        row.cos()

    trace = recorded(step)
    (new,) = call_of(trace, "aten.mul_.Tensor").outputs
    assert new.size_bytes == 8 * FLOAT  # the storage as a whole
    assert call_of(trace, "aten.sin.default").inputs == (new.tensor,)
    assert call_of(trace, "aten.cos.default").inputs == (new.tensor,)


def test_a_tensor_is_released_when_its_last_reference_goes() -> None:
    x = torch.ones(8)

    def step() -> None:
        first = x.exp()
        second = first.sin()
        del first
        second.cos()

    trace = recorded(step)
    exp, sin, cos = trace.calls
    first, second = (call.outputs[0].tensor for call in (exp, sin))
    assert position(trace, sin) < position(trace, Release(first)) < position(trace, cos)
    assert position(trace, cos) < position(trace, Release(second))


def test_what_autograd_has_saved_is_released_by_the_backward_that_used_it() -> None:
    weight = torch.ones(8, requires_grad=True)
    trace = recorded(lambda: weight.exp().sum().backward())
    saved = call_of(trace, "aten.exp.default").outputs[0].tensor
    used = call_of(trace, "aten.mul.Tensor")
    assert saved in used.inputs
    assert position(trace, used) < position(trace, Release(saved))


def test_a_view_of_a_parameter_is_no_result_and_the_gradients_are() -> None:
    model, x = nn.Linear(4, 3), torch.ones(2, 4)
    trace = recorded(lambda: model(x).sum().backward())
    sizes = {output.tensor: output.size_bytes for call in trace.calls for output in call.outputs}
    assert sorted(filter(None, (sizes[one] for one in trace.survivors))) == [3 * FLOAT, 12 * FLOAT]
    assert trace.constant_bytes == (12 + 3 + 8) * FLOAT


def test_the_peak_of_a_trace_is_the_peak_of_the_step() -> None:
    model = Encoder()
    tokens = torch.randint(0, 50, (4, 12))

    def step() -> None:
        model.zero_grad()
        model(tokens).sum().backward()

    trace = record_trace(step)
    model.zero_grad()
    meter = meter_for(torch.device("cpu"))
    meter.reset_peak()
    before = meter.read().in_use
    step()
    peak = meter.read().peak
    meter.close()
    assert trace.peak_bytes - trace.constant_bytes == peak - before


def test_recording_does_not_change_the_gradients() -> None:
    model, x = (
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)),
        torch.ones(3, 4),
    )

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    step()
    plain = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]
    recorded(step)
    for parameter, expected in zip(model.parameters(), plain, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected)


def test_only_cpu_and_cuda_can_be_recorded() -> None:
    with pytest.raises(ArgumentError, match="cpu or cuda"):
        record_trace(lambda: None, device="meta")


TRACE = Trace(
    (
        Constant(0, 100),
        Call("exp", 5, (0,), (Output(1, 100),)),
        Call("view", 1, (1,), (Output(2, 0, alias_of=1),)),
        Call("add_", 4, (2, 0), (Output(3, 100, replaces=2),)),
        Release(1),
        Release(2),
    )
)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 3), torch.ones(2, 4)
    for trace in (TRACE, recorded(lambda: model(x).sum().backward())):
        write(trace, tmp_path / "trace.jsonl")
        assert read_trace(tmp_path / "trace.jsonl") == trace


def damaged(folder: Path, change: Callable[[list[str]], object]) -> Path:
    """The file of a trace, with its lines changed."""
    path = folder / "damaged.jsonl"
    write(TRACE, path)
    lines = path.read_text().splitlines()
    change(lines)
    path.write_text("\n".join(lines) + "\n")
    return path


def replaced(number: int, line: object) -> Callable[[list[str]], object]:
    text = line if isinstance(line, str) else json.dumps(line)
    return lambda lines: lines.__setitem__(number - 1, text)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (replaced(1, "hello"), 'line 1: this is not a trace'),
        (replaced(1, {"format": "mimose-trace", "version": 7}), "line 1: version 7"),
        (replaced(3, '{"call": "ex'), "line 3: this is not JSON"),
        (replaced(3, [1]), "line 3: this is not a JSON object"),
        (replaced(2, {"constant": 0}), "line 2: 'bytes' is missing"),
        (replaced(2, {"constant": 0, "bytes": "many"}), "line 2: \"bytes\" is 'many'"),
        (replaced(2, {"constant": 0, "bytes": -4}), 'line 2: "bytes" is -4'),
        (replaced(2, {"constant": True, "bytes": 4}), 'line 2: "constant" is True'),
        (replaced(2, {"what": 0}), "line 2: this is neither"),
        (replaced(3, {"call": "f", "ns": 1, "in": 0, "out": []}), 'line 3: "in" is 0'),
        (replaced(3, {"call": "f", "ns": 1, "in": [0], "out": [1]}), 'line 3: "out" has 1'),
        (replaced(3, {"call": "f", "ns": 1, "in": [9], "out": []}), "line 3: f uses tensor 9"),
        (replaced(7, {"release": 9}), "line 7: release uses tensor 9"),
        (replaced(7, {"release": 1}), "line 7: release uses tensor 1, which was released"),
        (replaced(3, {"constant": 0, "bytes": 4}), "line 3: tensor 0 is made twice"),
        (lambda lines: lines.pop(), "line 7: the file ends here"),
        (lambda lines: lines.pop(6), "line 7: the trace has 6 events, but the file has 5"),
        (lambda lines: lines.append("{}"), "line 8: the trace ends here, but the file has 9"),
        (lambda lines: lines.__delitem__(slice(1, None)), "line 1: the file ends here"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_with_the_line_and_the_remedy(
    change: Callable[[list[str]], object], expected: str, tmp_path: Path
) -> None:
    path = damaged(tmp_path, change)
    with pytest.raises(ArgumentError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, {expected}")
    assert "ecord the step again" in str(caught.value)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ArgumentError, match=r"empty.*Record the step again"):
        read_trace(tmp_path / "empty.jsonl")


def test_a_trace_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ArgumentError, match="not an input of the call"):
        Trace((Constant(0, 4), Constant(1, 4), Call("f", 1, (0,), (Output(2, 0, alias_of=1),))))
    with pytest.raises(ArgumentError, match="0 bytes of its own"):
        Trace((Constant(0, 4), Call("f", 1, (0,), (Output(1, 4, alias_of=0),))))


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    pytest.importorskip("typer", reason="the command line is an extra")
    status = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


STEPS = """
import torch

def make_step():
    weight = torch.ones(64, 64, requires_grad=True)
    def step():
        weight.grad = None
        hidden = weight
        for _ in range(6):
            hidden = (hidden @ weight).relu()
        hidden.sum().backward()
    return step

def three():
    return 3

def failing():
    def step():
        raise RuntimeError("no data\\nsecond line")
    return step
"""


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traced_steps.py").write_text(STEPS)
    monkeypatch.delitem(sys.modules, "traced_steps", raising=False)
    return "traced_steps"


def test_the_command_records_a_step_and_tells_the_overheads(
    capsys: pytest.CaptureFixture[str], steps: str
) -> None:
    status, out, err = said(capsys, "trace", f"{steps}:make_step", "--device", "cpu")
    assert (status, err) == (0, "wrote trace.jsonl\n")
    assert len(read_trace("trace.jsonl").calls) > 20
    for name in ("h_DTR", "h_DTR^eq", "h_MSPS", "h_LRU", "h_size", "90%", "30%"):
        assert name in out


def test_the_command_reads_a_recorded_trace_and_writes_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(TRACE, tmp_path / "t.jsonl")
    words = ("trace", tmp_path / "t.jsonl", "--heuristic", "h_LRU", "--json")
    status, out, err = said(capsys, *words)
    assert (status, err) == (0, "")
    values = json.loads(out)
    assert values["calls"] == 3
    assert values["outcomes"]["h_LRU"][0]["budget_bytes"] == 270


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("{}:three",), "returned 3. It must return a function"),
        (("{}:failing",), "RuntimeError: no data (traced_steps.py, line 19). It must run twice"),
        (("{}:missing",), "AttributeError"),
        (("no_module_of_this_name:f",), "ModuleNotFoundError"),
        (("nothing",), "neither a trace file nor module:function"),
        (("missing.jsonl",), "no such file"),
        (("traced_steps.py",), "line 1: this is not a trace"),
        (("{}:make_step", "--heuristic", "h_X"), "h_DTR, h_DTR^eq"),
        (("{}:make_step", "--device", "tpu"), "cpu or cuda"),
        (("{}:make_step", "-o", "missing/x.jsonl"), "mkdir -p missing"),
    ],
)
def test_the_command_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], steps: str, words: tuple[str, ...], expected: str
) -> None:
    status, out, err = said(capsys, "trace", *(word.format(steps) for word in words))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert expected in err
    assert not Path("trace.jsonl").exists()


def test_the_file_in_the_documentation_can_be_read(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "traces.md"
    (shown,) = re.findall(r"```json\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    (tmp_path / "shown.jsonl").write_text(shown)
    trace = read_trace(tmp_path / "shown.jsonl")
    assert (len(trace.calls), trace.survivors) == (3, (3,))
