"""Why a trained model holds or fails: its attention seen query by query, measured, explained.

`observe` shows the attention of any causal language model; `measure` gives rows (`rows`) of what
each head does with near and far keys at each context length; `diagnose` joins them with the laws of
steps, predictions and interventions.
"""

from farfield.diagnosis.diagnose import Diagnosis, diagnose
from farfield.diagnosis.measured import BoundViolationError, Measured, Settings, measure
from farfield.diagnosis.probe import Coverage, observe
from farfield.diagnosis.rows import read_rows, write_rows
from farfield.diagnosis.sampling import Sampling

__all__ = [
    "BoundViolationError",
    "Coverage",
    "Diagnosis",
    "Measured",
    "Sampling",
    "Settings",
    "diagnose",
    "measure",
    "observe",
    "read_rows",
    "write_rows",
]
