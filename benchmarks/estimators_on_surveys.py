"""The paper's Table 3 on sizes that were observed on a GPU: errors and times of estimators.

    python benchmarks/estimators_on_surveys.py …-h200-bench.jsonl --out results.json

`mimose bench` observes each task at many sizes and stores what every block cost. This script learns
from 4 to 10 of these sizes and predicts the others, with mimose's estimator as it is now and with
those that the paper compares, XGBoost included. Errors are of memory on the GPU; times of fitting
and predicting are those of the machine that runs this script.
"""

from __future__ import annotations

from pathlib import Path

from common import circumstances, parser_of, save
from mimose.bench.estimators import compare
from mimose.bench.records import read


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("surveyed", type=Path, help="results of mimose bench")
    options = parser.parse_args()
    found = read(options.surveyed)
    results = {
        "benchmark": "estimators_on_surveys",
        **circumstances(options.allow_dirty),
        "surveyed": options.surveyed.name,
        "surveyed_machine": found.header["machine"],
        "tasks": {task: compare(survey.observations) for task, survey in found.surveys.items()},
    }
    save(results, options.out)
    for task, rows in results["tasks"].items():
        for row in rows:
            if row["samples"] == 10:
                print(task, row["estimator"], row.get("mean_error"), row.get("missing", ""))


if __name__ == "__main__":
    main()
