"""From observations to predictions.

Fits what was observed at some sizes and predicts a profile at any size. Knows neither torch nor
plans: what a prediction is used for is not its concern.
"""

from mimose.estimation.cost_model import Estimate, Knowledge
from mimose.estimation.dimensions import Shape
from mimose.estimation.estimator import Estimator
from mimose.estimation.regimes import Chapters
from mimose.estimation.similar_blocks import Sample
from mimose.estimation.times import with_shared_times

__all__ = [
    "Chapters",
    "Estimate",
    "Estimator",
    "Knowledge",
    "Sample",
    "Shape",
    "with_shared_times",
]
