"""The command: measures, continues, refuses, reports."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from mimose.bench import circumstances, schedule
from mimose.bench.command import app
from mimose.bench.extras import MissingExtra, need
from mimose.bench.records import Code, read
from mimose.bench.report import BEGIN, END
from mimose.bench.source import PACKAGE, git_hash, source

QUICKLY = (
    *("--tasks", "TC-Bert", "--steps", "8", "--rounds", "1", "--tight", "50"),
    "--allow-dirty",
)
PAIR = (*QUICKLY, "--contestants", "plain,mimose", "--no-estimators")


def bench(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "results.jsonl"
    who = "plain,torch-all,static,greedy+shuttle,mimose,oracle"
    result = bench(*QUICKLY, "--contestants", who, "--rounds", 2, "--out", path)
    assert result.exit_code == 0, result.output
    return path


def test_a_run_leaves_one_file_with_everything_in_it(measured: Path) -> None:
    results = read(measured)
    assert results.header["torch"] == torch.__version__
    assert results.conditions["steps"] == 8
    assert len(results.records) == 12
    code = {record.code for record in results.records.values()}
    assert code == {Code.of(results.header)}
    assert results.header["tree_state"] in ("clean", "dirty", "unknown")
    assert results.header["source_tree"] == git_hash(PACKAGE)
    assert all(len(r.run.steps.loss) == 8 for r in results.records.values())
    assert results.estimators["TC-Bert"]


def test_a_contestant_that_finished_no_step_is_reported_all_the_same(
    measured: Path, tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in measured.read_text().splitlines()]
    for line in lines:
        if line.get("contestant") == "mimose":
            line["run"]["spent"]["reserve_bytes"] = None
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    result = bench("--report", path, "-o", tmp_path / "report")
    assert result.exit_code == 0, result.output


def test_contestants_take_turns_and_begin_in_another_order_each_round(measured: Path) -> None:
    order = [(r.round, r.contestant) for r in read(measured).records.values()]
    first, second = ([who for number, who in order if number == n] for n in (0, 1))
    assert sorted(first) == sorted(second)
    assert first[0] != second[0]


def test_the_same_command_measures_nothing_again(measured: Path) -> None:
    before = measured.read_bytes()
    who = "plain,torch-all,static,greedy+shuttle,mimose,oracle"
    result = bench(*QUICKLY, "--contestants", who, "--rounds", 2, "--out", measured)
    assert result.exit_code == 0
    assert measured.read_bytes() == before


def test_tables_can_be_left_for_later(measured: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(measured.read_bytes())
    who = "plain,torch-all,static,greedy+shuttle,mimose,oracle"
    result = bench(*QUICKLY, "--contestants", who, "--rounds", 2, "--no-tables", "--out", path)
    assert result.exit_code == 0, result.output
    assert list(tmp_path.iterdir()) == [path]
    assert result.stdout.strip().startswith("task")  # the terminal's table needs no matplotlib


def test_tables_and_figures_come_of_a_finished_file(measured: Path) -> None:
    page = (measured.with_suffix("") / "README.md").read_text()
    headings = ("Against the others", "Everybody", "What deciding costs", "Estimators")
    for heading in (*headings, "The two stars", "Left unused", "At the loosest budget"):
        assert f"### {heading}" in page
    assert "| TC-Bert | tight 50" in page
    assert "3.95" in page
    figures = {path.name for path in (measured.with_suffix("") / "results").iterdir()}
    assert len(figures) == 8
    assert {"time-by-budget.png", "step-time-and-memory.png", "losses.png"} < figures


def test_the_command_ends_with_time_and_peak_of_every_contestant(measured: Path) -> None:
    result = bench("--report", measured)
    header, *rows = result.stdout.strip().splitlines()
    assert header.split("  ")[0] == "task"
    assert [row.split("GiB")[-1].split("MiB")[-1].split()[0] for row in rows] == [
        *("plain", "torch-all", "static", "greedy+shuttle", "mimose", "oracle")
    ]
    assert [row[:7] for row in rows] == ["TC-Bert", *[" " * 7] * 5]
    plain, mimose = (rows[n].split() for n in (0, 4))
    assert float(plain[-2]) > 1 >= float(mimose[-2])  # of the budget
    assert plain[-4] == "1.00"  # × plain
    assert "peak, MiB" in header  # a small model, on a CPU
    assert float(plain[-3]) > 1


def test_the_page_begins_with_time_and_peak_and_ends_with_goals(measured: Path) -> None:
    page = (measured.with_suffix("") / "README.md").read_text()
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings[0] == "## Time and memory"
    assert headings[-1] == "## Goals, and the paper's numbers"
    assert page.index("| contestant | seconds | × plain | peak, MiB |") < page.index("Against the")


def test_a_report_goes_into_another_page_between_its_marks(measured: Path, tmp_path: Path) -> None:
    page = tmp_path / "BENCHMARKS.md"
    page.write_text(f"# Before\n\n{BEGIN}\nreplaced\n{END}\n\nafter\n")
    result = bench("--report", measured, "-o", tmp_path / "out", "--into", page)
    assert result.exit_code == 0
    text = page.read_text()
    assert text.startswith("# Before")
    assert text.endswith("after\n")
    assert "replaced" not in text
    assert "[results.jsonl](out/README.md)" in text
    assert "| task | budget | / torch-all |" in text
    assert (tmp_path / "out" / "results" / "losses.png").exists()


def test_an_interrupted_run_keeps_what_it_has_and_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run, calls = tmp_path / "x.jsonl", schedule.run, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(schedule, "run", interrupted)
    result = bench(*PAIR, "--out", path)
    assert result.exit_code == 130
    assert "contains 1 run. " in result.output
    assert "The same command continues" in result.output
    with path.open("a") as file:
        file.write('{"kind":"run","task":"TC')  # a crash in the middle of a line
    assert bench(*PAIR, "--out", path).exit_code == 0
    assert len(calls) == 3
    assert {r.contestant for r in read(path).records.values()} == {"plain", "mimose"}
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_code_without_a_commit_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__init__.py").touch()
    elsewhere = functools.partial(source, package=tmp_path)
    monkeypatch.setattr(circumstances, "source", elsewhere)
    for name in ("MIMOSE_COMMIT", "MIMOSE_TREE"):
        monkeypatch.delenv(name, raising=False)
    words = [word for word in PAIR if word != "--allow-dirty"]
    result = bench(*words, "--out", tmp_path / "x.jsonl")
    assert result.exit_code == 2
    assert "results could not be traced to a commit" in result.output
    assert not (tmp_path / "x.jsonl").exists()


def test_a_time_limit_stops_between_runs(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    result = bench(*PAIR, "--time-limit", 0, "--out", path)
    assert result.exit_code == 0
    assert "stopped at the time limit: " in result.output
    assert "contains 0 runs. " in result.output
    assert not read(path).records


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tasks", "QA-GPT"), "there is no task 'QA-GPT'"),
        (("--contestants", "nobody"), "there is no contestant 'nobody'"),
        (("--precision", "fp8"), "--precision fp8"),
        (("--tight", "half"), "'half' is not a number"),
        (("--budget", "1MiB"), "below the floor of TC-Bert"),
        (("--device", "tpu"), "--device tpu"),
        (("--quick", "--full"), "exclude each other"),
    ],
)
def test_bad_input_is_one_clear_line(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = bench(*PAIR, *words, "--out", tmp_path / "x.jsonl")
    assert result.exit_code == 2
    last = result.output.strip().splitlines()[-1]
    assert last.startswith("mimose bench: ")
    assert message in last
    assert "Traceback" not in result.output


def test_an_attention_is_refused_before_a_file_is_begun(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    result = bench(*PAIR, "--attention", "flash", "--out", path)
    assert result.exit_code == 2
    assert "--attention flash: TC-Bert has only eager and sdpa" in result.output
    assert not path.exists()  # it would refuse the corrected command


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_missed_in_words(tmp_path: Path) -> None:
    result = bench(*PAIR, "--device", "cuda", "--out", tmp_path / "x.jsonl")
    assert result.exit_code == 2
    assert "sees no CUDA device" in result.output


def test_a_file_measured_otherwise_is_refused_and_left_alone(measured: Path) -> None:
    before = measured.read_bytes()
    result = bench(*PAIR, "--scale", 2, "--out", measured)
    assert result.exit_code == 2
    assert "measured with scale = 1, and now it is 2" in result.output
    assert measured.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mimose", "0.0.1", "with mimose 0.0.1, and here it is"),
        ("machine", "another", "with machine another"),
        ("environment", {"OMP_NUM_THREADS": "99"}, "with environment {'OMP_NUM_THREADS': '99'}"),
        ("format", 99, "has format 99"),
        ("format", 1, "has format 1, and new runs are written in format 2"),
    ],
)
def test_a_file_of_another_version_is_refused(
    measured: Path, tmp_path: Path, name: str, value: object, message: str
) -> None:
    header, rest = measured.read_text().split("\n", 1)
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps({**json.loads(header), name: value}) + "\n" + rest)
    result = bench(*QUICKLY, "--out", path)
    assert result.exit_code == 2
    assert message in result.output


def test_what_older_files_call_paper_is_the_hybrid_of_its_scheduler_and_mimose(
    measured: Path, tmp_path: Path
) -> None:
    header, rest = measured.read_text().split("\n", 1)
    path = tmp_path / "old.jsonl"
    older = rest.replace('"greedy+shuttle"', '"paper"')
    path.write_text(json.dumps({**json.loads(header), "format": 1}) + "\n" + older)
    assert read(path).records.keys() == read(measured).records.keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--out", "nowhere/x.jsonl"), "--out nowhere/x.jsonl: there is no folder nowhere"),
        (("--out", "folder"), "--out folder is a folder: name a file"),
        (("--out", "results"), "--out results: the folder for tables has the same name"),
        (("--out", "x.jsonl", "-o", "file"), "--output file is a file: name a folder"),
        (("--out", "x.jsonl", "-o", "a/b"), "--output a/b: there is no folder a"),
        (("--report", "file", "-o", "folder", "--into", "no.md"), "--into no.md cannot be read"),
    ],
)
def test_what_could_not_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    result = bench(*PAIR, *words)
    assert result.exit_code == 2
    assert message in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "file"}


def test_a_report_on_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("hello\n")
    for file, message in ((path, "is not a results file"), (tmp_path / "no", "cannot be read")):
        result = bench("--report", file)
        assert result.exit_code == 2
        assert message in result.output


def test_a_missing_extra_tells_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"pip install '.*in a clone: .*\[bench\]"):
        need("matplotlib")
    result = bench(*PAIR)
    assert result.exit_code == 2
    assert "needs matplotlib" in result.output


def test_a_script_without_an_extra_prints_what_to_install_and_fails() -> None:
    script = "import sys; sys.modules['typer'] = None; from mimose.bench.extras import need; "
    command = [sys.executable, "-c", script + "need('typer')"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs typer, which is not installed: pip install" in done.stderr
