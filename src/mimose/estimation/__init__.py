"""From observations to predictions: the paper's estimator.

Fits the observed costs of some input sizes, and predicts the profile of any size together with how
reliable the prediction is. Knows neither torch nor plans.
"""

from mimose.estimation.cost_model import CostModel
from mimose.estimation.dimensions import Shape
from mimose.estimation.estimator import Estimator
from mimose.estimation.prediction import Prediction, State, Surprise
from mimose.estimation.proportions import Proportions
from mimose.estimation.regimes import CostModels
from mimose.estimation.times import with_shared_times

__all__ = [
    "CostModel",
    "CostModels",
    "Estimator",
    "Prediction",
    "Proportions",
    "Shape",
    "State",
    "Surprise",
    "with_shared_times",
]
