"""The native Hugging Face model."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from farfield.model.cache import FarfieldCache
from farfield.model.configuration import FarfieldConfig
from farfield.model.modeling import FarfieldForCausalLM, FarfieldModel


def register() -> None:
    """Make transformers' Auto classes know the model."""
    AutoConfig.register(FarfieldConfig.model_type, FarfieldConfig, exist_ok=True)
    AutoModel.register(FarfieldConfig, FarfieldModel, exist_ok=True)
    AutoModelForCausalLM.register(FarfieldConfig, FarfieldForCausalLM, exist_ok=True)


__all__ = ["FarfieldCache", "FarfieldConfig", "FarfieldForCausalLM", "FarfieldModel", "register"]
