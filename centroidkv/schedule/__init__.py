"""Schedule: how much each round removes."""

from centroidkv.schedule.constant import Constant
from centroidkv.schedule.fewest_rounds import FewestRounds
from centroidkv.schedule.linear_annealing import LinearAnnealing
from centroidkv.schedule.sizes import plan_sizes

__all__ = ["Constant", "FewestRounds", "LinearAnnealing", "plan_sizes"]
