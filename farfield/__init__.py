"""farfield: attention whose position mechanism is an accumulated transformation.

    from farfield import FarfieldConfig, FarfieldForCausalLM
    model = FarfieldForCausalLM(FarfieldConfig(mechanism="learned+v+alibi"))

Importing the package registers the model with transformers' Auto classes, so that
`AutoModelForCausalLM.from_pretrained(folder)` loads what farfield trained.
"""

from farfield.attention import mechanisms
from farfield.model import FarfieldConfig, FarfieldForCausalLM, FarfieldModel, register

__version__ = "0.1.0"

register()

__all__ = ["FarfieldConfig", "FarfieldForCausalLM", "FarfieldModel", "__version__", "mechanisms"]
