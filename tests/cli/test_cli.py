"""The command line as its users meet it: answers, one-line refusals, exit codes, clean pipes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import mimose
from mimose.cli import demo, demo_training
from mimose.cli.demo_model import Shape
from mimose.cli.main import main

pytest.importorskip("typer", reason="the command line is an extra")

SOURCE = str(Path(mimose.__file__).parent.parent)


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """One line on standard error, exit status 2, nothing on standard output."""
    status, out, err = said(capsys, *words)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("mimose")
    return err


def shell(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mimose", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE, **environment},
        check=False,
    )


def test_report_writes_each_format_beside_the_recording(
    capsys: pytest.CaptureFixture[str], recording_file: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run.jsonl"
    copy.write_bytes(recording_file.read_bytes())
    for form, start in (("html", b"<!doctype"), ("md", b"# mimose"), ("png", b"\x89PNG")):
        status, out, err = said(capsys, "report", copy, "--format", form)
        written = copy.with_suffix(f".{form}")
        assert (status, out) == (0, "")
        assert str(written) in err
        assert written.read_bytes().startswith(start)


def test_report_speaks_to_machines(
    capsys: pytest.CaptureFixture[str], recording_file: Path
) -> None:
    status, out, err = said(capsys, "report", recording_file, "--json")
    assert (status, err) == (0, "")
    values = json.loads(out)
    assert values["total_steps"] == 25
    assert len(values["sizes"]) > 10


def test_report_to_the_terminal(capsys: pytest.CaptureFixture[str], recording_file: Path) -> None:
    status, out, _ = said(capsys, "report", recording_file, "--format", "md", "-o", "-")
    assert status == 0
    assert out.startswith("# mimose: run")


def test_report_sees_that_a_file_holds_benchmark_results(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    header = {"kind": "header", "format": 1, "machine": "<b>a machine</b>", "python": "3", "torch":
              "2", "transformers": "5", "mimose": mimose.__version__, "date": "2026-01-01",
              "expandable_segments": None,
              "conditions": {"device": "cpu", "steps": 8, "scale": 1, "precision": None,
                             "attention": None, "small": True, "seed": 0}}  # fmt: skip
    results = tmp_path / "bench.jsonl"
    results.write_text(json.dumps(header, separators=(",", ":")) + "\n")
    status, _, err = said(capsys, "report", results)
    assert status == 0, err
    page = results.with_suffix(".html").read_text()
    assert "mimose bench" in page
    assert "<b>a machine" not in page
    results.write_text('{"kind":"header","format":99}\n')
    assert "format 99" in refused(capsys, "report", results)


def test_plan_answers_in_a_table_and_to_machines(
    capsys: pytest.CaptureFixture[str], recording_file: Path, tmp_path: Path
) -> None:
    status, out, _ = said(capsys, "plan", recording_file, "-b", "6MiB", "-b", "8MiB")
    assert status == 0
    assert "6.00 MiB" in out
    assert "everything is kept" in " ".join(out.split())
    status, out, _ = said(
        capsys, "plan", recording_file, "-b", "6MiB", "--lengths", "20-160", "--json",
        "--plot", tmp_path / "plan.png",
    )  # fmt: skip
    assert status == 0
    (row,) = json.loads(out)["rows"]
    assert row["budget_bytes"] == 6 << 20
    assert row["recompute_seconds"] > 0
    assert (tmp_path / "plan.png").exists()


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_no_value_is_cut_in_a_narrow_terminal_or_a_pipe(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    recorded_with_host: tuple[Path, mimose.Mimose],
    command: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    status, narrow, _ = said(capsys, command, recorded_with_host[0])
    assert status == 0
    assert "…" not in narrow
    monkeypatch.setenv("COLUMNS", "200")
    wide = said(capsys, command, recorded_with_host[0])[1]
    rows = [line.rstrip() for line in wide.splitlines() if re.match(r" *\d+(\.\d+)? .iB ", line)]
    assert rows
    if command == "plan":  # `compare` measures the time of planning
        assert set(rows) <= {line.rstrip() for line in narrow.splitlines()}


def test_what_cannot_be_is_answered_in_one_line(
    capsys: pytest.CaptureFixture[str], recording_file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("hello\n")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    young = tmp_path / "young.jsonl"
    young.write_text(recording_file.read_text().split("\n")[0] + "\n")
    assert "no such file" in refused(capsys, "report", tmp_path / "nowhere.jsonl")
    assert "neither a recording nor" in refused(capsys, "report", other)
    for command in ("report", "plan", "compare"):
        assert "no step has been written yet" in refused(capsys, command, empty)
    assert "train a little longer" in refused(capsys, "report", young)
    assert "directory" in refused(capsys, "report", tmp_path)
    assert "invalid" in refused(capsys, "report", recording_file, "--format", "pdf").lower()
    assert "neither a recording nor" in refused(capsys, "plan", other)
    assert "has no observed steps yet: train a few more" in refused(capsys, "plan", young)
    assert ".png" in refused(capsys, "plan", recording_file, "--plot", tmp_path / "plan.xyz")
    assert "did you mean 6GiB?" in refused(capsys, "plan", recording_file, "-b", "6G")
    assert "such as 6GiB" in refused(capsys, "plan", recording_file, "-b", "80%")
    assert "there is no such file" in refused(
        capsys, "plan", recording_file, "--lengths", "nowhere.csv"
    )
    assert "neither numbers nor a file" in refused(
        capsys, "plan", recording_file, "--lengths", "1;2"
    )
    unknown = refused(capsys, "plan", recording_file, "--planner", "best")
    assert "--planner 'best' is unknown: use one of optimal, greedy," in unknown
    assert "'64,128'" not in refused(capsys, "plan", recording_file, "--samples")
    assert "leave out --output" in refused(capsys, "report", recording_file, "--json", "-o", "x")
    assert refused(capsys, "repot").endswith("'report'? Try: mimose --help\n")
    assert refused(capsys, "report").endswith("Try: mimose report --help\n")


@pytest.mark.parametrize("name", ["size", "base"])
def test_recording_without_readable_steps_is_said_to_be_damaged(
    capsys: pytest.CaptureFixture[str], recording_file: Path, tmp_path: Path, name: str
) -> None:
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text(recording_file.read_text().replace(f'"{name}":', '"other":'))
    for command in ("report", "plan", "compare"):
        error = refused(capsys, command, damaged)
        assert re.search(r": \d+ lines cannot be read \(\d+, \d+, \d+ …\) and no step", error)
        assert "damaged. Record the run again" in error


def test_file_of_another_command_is_refused_by_the_name_of_that_command(
    capsys: pytest.CaptureFixture[str], recorded: tuple[Path, mimose.Mimose], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"format": "mimose-trace", "version": 1}\n')
    results = tmp_path / "bench.jsonl"
    results.write_text('{"kind":"header","format":1}\n')
    state = recorded[0].with_name("state.json")
    saved = tmp_path / "state.pt"
    torch.save(recorded[1].state_dict(), saved)
    for command in ("report", "plan", "compare"):
        assert "an operator trace: use mimose trace" in refused(capsys, command, trace)
    for command in ("report", "compare"):
        for file in (state, saved):
            assert "a saved state: use mimose plan" in refused(capsys, command, file)
    for command in ("plan", "compare"):
        assert "benchmark results: use mimose report" in refused(capsys, command, results)


def test_truncated_state_is_said_to_be_damaged(
    capsys: pytest.CaptureFixture[str], recorded: tuple[Path, mimose.Mimose], tmp_path: Path
) -> None:
    saved = tmp_path / "state.pt"
    torch.save(recorded[1].state_dict(), saved)
    written = saved.read_bytes()
    saved.write_bytes(written[: len(written) // 2])
    assert "state.pt is damaged" in refused(capsys, "plan", saved)
    torch.save({"mimose": recorded[1].state_dict(), "own": Shape}, saved)
    assert "handle.state_dict() to a file of its own" in refused(capsys, "plan", saved)


def test_saved_state_says_that_it_does_not_know_how_often_sizes_came(
    capsys: pytest.CaptureFixture[str], recorded: tuple[Path, mimose.Mimose]
) -> None:
    words = "plan", recorded[0].with_name("state.json"), "--floor", "1MiB"
    status, _, err = said(capsys, *words)
    assert status == 0
    assert re.search(r"only the \d+ sizes that were measured, not how often each came", err)
    assert said(capsys, *words, "--lengths", "60")[2] == ""


def test_output_name_decides_the_format_of_a_report(
    capsys: pytest.CaptureFixture[str], recording_file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    for name, start in (("a.png", b"\x89PNG"), ("a.md", b"# mimose"), ("a.txt", b"<!doctype")):
        assert said(capsys, "report", recording_file, "-o", tmp_path / name)[0] == 0
        assert (tmp_path / name).read_bytes().startswith(start)
    page = tmp_path / "b.png"
    error = refused(capsys, "report", recording_file, "--format", "html", "-o", page)
    assert "is a picture, but --format is html: give --format png" in error
    assert not page.exists()


def test_benchmark_results_are_not_written_to_a_file_named_like_a_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "bench.jsonl"
    file.write_text('{"kind":"header","format":1}\n')
    error = refused(capsys, "report", file, "-o", tmp_path / "bench.png")
    assert "is the name of a picture, but benchmark results are" in error


def test_invalid_value_is_answered_with_a_valid_one(
    capsys: pytest.CaptureFixture[str], recording_file: Path
) -> None:
    error = refused(capsys, "report", recording_file, "--format", "pdf")
    assert "Value error" not in error
    assert "'pdf' is not one of" in error
    for words in (("--steps", "1"), ("--steps=1",)):
        assert "bench: --steps 1: give at least 2" in refused(capsys, "bench", *words)
    assert "--time-limit -3: give at least 0" in refused(capsys, "bench", "--time-limit", "-3")
    error = refused(capsys, "compare", recording_file, "--time-limit", "long")
    assert "--time-limit long: give a number" in error


@pytest.mark.parametrize("option", ["--budget", "--floor"])
def test_a_size_without_a_device_is_never_told_to_be_a_share_of_it(
    option: str, capsys: pytest.CaptureFixture[str], recording_file: Path
) -> None:
    for text in ("lots", "6XB", "9" * 5000):
        message = refused(capsys, "plan", recording_file, option, text)
        assert option in message
        assert "auto" not in message
        assert "%" not in message


def test_help_comes_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("report", "plan", "trace", "demo"):
        status, out, _ = said(capsys, command, "--help")
        assert status == 0
        assert f"mimose {command}" in out.partition("Examples")[2]
    status, out, _ = said(capsys, "--help")
    assert status == 0
    for command in ("report", "plan", "trace", "demo", "doctor", "bench"):
        assert command in out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--version")[:2] == (0, f"mimose {mimose.__version__}\n")


def test_no_colours_go_into_a_pipe(recording_file: Path) -> None:
    done = shell("plan", str(recording_file), TERM="xterm-256color")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr


def test_without_typer_what_needs_none_works_and_the_rest_says_what_to_install() -> None:
    code = (
        "import importlib.util, sys\n"
        "sys.modules['typer'] = sys.modules['rich'] = None\n"
        "real = importlib.util.find_spec\n"
        "gone = lambda name, *a: None if name in ('typer', 'rich') else real(name, *a)\n"
        "importlib.util.find_spec = gone\n"
        "from mimose.cli.main import main\n"
        "for words in (['report', 'x'], ['--version'], ['--help'], [], ['doctor', '--help']):\n"
        "    try:\n"
        "        print(words, main(words))\n"
        "    except SystemExit as end:\n"
        "        print(words, end.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
        check=False,
    )
    assert "this command needs typer and rich: pip install 'typer>=" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "['report', 'x'] 2\n" in done.stdout
    assert f"mimose {mimose.__version__}\n['--version'] 0\n" in done.stdout
    for words in ("['--help'] 0\n", "[] 0\n", "['doctor', '--help'] 0\n"):
        assert words in done.stdout
    assert done.stdout.count("Predict the cost of other budgets") == 2


def test_help_without_extras_says_what_the_commands_help_says() -> None:
    from mimose.cli.commands import app
    from mimose.cli.main import COMMANDS

    told = {}
    for command in app.registered_commands:
        assert command.callback is not None
        told[command.callback.__name__] = str(command.callback.__doc__).partition("\n")[0]
    assert told == COMMANDS


def _heed_interrupts() -> None:
    """Whoever runs these tests in the background may have told its children not to."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_is_clean(tmp_path: Path) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "mimose", "demo", "-o", str(tmp_path / "demo.html")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
        preexec_fn=_heed_interrupts,
    )
    assert running.stderr is not None
    assert "plain" in running.stderr.readline()
    time.sleep(0.3)
    running.send_signal(signal.SIGINT)
    try:
        _, err = running.communicate(timeout=15)
        assert "Traceback" not in err
    except subprocess.TimeoutExpired:  # Python drops one that arrives in a finalizer: press again
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted" in err


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo, small: what takes a minute is the training, not the telling."""
    monkeypatch.setattr(demo_training, "STEPS", 8)
    monkeypatch.setattr(demo_training, "ROUNDS", 1)
    monkeypatch.setattr(demo_training, "SMALL", Shape(width=16, layers=3, batch=2, longest=96))


@pytest.mark.usefixtures("quick")
def test_the_demo_compares_four_ways_and_leaves_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "demo.html"
    status, out, err = said(capsys, "demo", "-o", page)
    assert status == 0
    for way in ("plain", "everything recomputed", "static plan", "mimose"):
        assert f"\n{way} " in f"\n{out}"
    assert "identical, bit for bit" in out
    assert "input 2×96" in out
    assert "not attached" not in out
    assert str(page) in err
    assert page.read_text().startswith("<!doctype")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("nowhere/demo.html", "mkdir -p nowhere"),
        ("folder", "--output folder is a folder: name a file, such as folder/demo.html"),
        ("taken.html", "the recording taken.jsonl is a folder"),
        ("run.jsonl", "the page must end in .html, since the recording is written to .jsonl"),
    ],
)
def test_a_page_that_could_not_be_written_is_refused_before_training(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    output: str,
    message: str,
) -> None:
    def compare(*_: object) -> None:
        raise AssertionError("it has begun to train")

    monkeypatch.setattr(demo_training, "compare", compare)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "taken.jsonl").mkdir()
    assert message in refused(capsys, "demo", "-o", output)
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "taken.jsonl"}


def test_output_that_could_not_be_written_is_refused_by_its_option(
    capsys: pytest.CaptureFixture[str], recording_file: Path, tmp_path: Path
) -> None:
    page, plot = tmp_path / "nowhere" / "run.html", tmp_path / "nowhere" / "plan.png"
    assert f"--output {page}: there is no" in refused(capsys, "report", recording_file, "-o", page)
    assert "name a file, such as" in refused(capsys, "report", recording_file, "-o", tmp_path)
    assert f"--plot {plot}: there is no" in refused(capsys, "plan", recording_file, "--plot", plot)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("quick")
def test_the_demo_speaks_to_machines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = said(capsys, "demo", "--json", "-o", tmp_path / "demo.html")
    assert status == 0
    values = json.loads(out)
    assert values["identical"]
    assert values["ways"]["mimose"]["peak_bytes"] <= values["budget_bytes"]
    assert values["ways"]["plain"]["peak_bytes"] > values["budget_bytes"]


@pytest.mark.usefixtures("quick")
def test_the_demo_needs_no_extras(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo.main() == 0
    assert str(tmp_path / "mimose-demo.html") in capsys.readouterr().out


def test_the_live_view_draws_steps_blocks_and_memory() -> None:
    rich = pytest.importorskip("rich.console")
    from mimose.cli.terminal import LiveDemo

    console = rich.Console(record=True, force_terminal=True, width=100, file=io.StringIO())
    moment = demo_training.DemoStep(1, 2, "mimose", 7, 41, 120, "rrK", 90 << 20, 100 << 20)
    with LiveDemo(console) as live:
        live(moment)
        shown = console.export_text(clear=False)
        live(moment.__class__(**{**vars(moment), "peak_bytes": 200 << 20}))
        over = console.export_text()
    for words in ("round 1 of 2", "mimose", "7 of 41, 120 tokens", "██ ██ ██", "of 100 MiB"):
        assert words in shown
    assert ": over" not in shown
    assert ": over" in over


@pytest.mark.parametrize("options", [["--json"], ["--format", "md", "-o", "-"]])
def test_benchmark_results_are_not_values_nor_text_for_the_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str]
) -> None:
    file = tmp_path / "bench.jsonl"
    file.write_text('{"kind":"header","format":1}\n')
    assert "contains benchmark results" in refused(capsys, "report", file, *options)
    assert list(tmp_path.iterdir()) == [file]


def test_a_picture_is_not_written_to_the_terminal(
    capsys: pytest.CaptureFixture[str], recording_file: Path
) -> None:
    error = refused(capsys, "report", recording_file, "--format", "png", "-o", "-")
    assert "name a file" in error


def test_report_does_not_write_over_what_it_reports_on(
    capsys: pytest.CaptureFixture[str], recording_file: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run.jsonl"
    copy.write_bytes(recording_file.read_bytes())
    assert "name another one" in refused(capsys, "report", copy, "-o", copy)
    assert copy.read_bytes() == recording_file.read_bytes()


def test_a_budget_in_bytes_needs_no_unit(
    capsys: pytest.CaptureFixture[str], recording_file: Path
) -> None:
    code, out, _ = said(capsys, "plan", recording_file, "--budget", 64 << 20, "--json")
    assert code == 0
    assert str(64 << 20) in out


@pytest.mark.parametrize("row", ["0", "-3", "10,-5", "10,nan", "10,inf"])
def test_lengths_that_cannot_be_are_refused_with_their_line(
    capsys: pytest.CaptureFixture[str], recording_file: Path, tmp_path: Path, row: str
) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text(f"30\n{row}\n")
    assert "line 2" in refused(capsys, "plan", recording_file, "--lengths", file)
    file.write_text("30,0\n")
    assert "no lengths" in refused(capsys, "plan", recording_file, "--lengths", file)
    file.write_text('30\n"' + "1" * 200_000)
    assert "is not a CSV file" in refused(capsys, "plan", recording_file, "--lengths", file)
