"""EleutherAI's lm-eval: a model named ``centroidkv`` whose generation and scoring run through a CentroidCache.

lm-eval has no entry points for models, so its own command does not know the name. Importing this package adds it to
lm-eval's registry (nothing else is touched); ``python -m centroidkv.integrations.lm_eval`` does that and then hands
its arguments to lm-eval's command line unchanged.
"""

try:
    import lm_eval as _lm_eval  # noqa: F401
except ImportError as error:  # pragma: no cover - depends on the environment
    raise ImportError("centroidkv.integrations.lm_eval needs lm-eval: pip install 'centroidkv[lm_eval]'") from error

from centroidkv.integrations.lm_eval.model import CentroidLM
from centroidkv.integrations.lm_eval.question import question_start

__all__ = ["CentroidLM", "question_start"]
