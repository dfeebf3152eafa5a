"""From observations to predictions.

Fits what was observed at some sizes and predicts a profile at any size. Knows neither torch nor
plans: what a prediction is used for is not its concern.
"""

from mimose.estimation.cost_model import CostModel, Estimate
from mimose.estimation.dimensions import Shape
from mimose.estimation.estimator import Estimator
from mimose.estimation.regimes import CostModels
from mimose.estimation.similar_blocks import Sample
from mimose.estimation.times import with_shared_times

__all__ = [
    "CostModel",
    "CostModels",
    "Estimate",
    "Estimator",
    "Sample",
    "Shape",
    "with_shared_times",
]
