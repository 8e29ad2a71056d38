"""Attention by accumulated transport, in torch alone."""

from farfield.attention import mechanisms
from farfield.attention.layer import Attention
from farfield.attention.mechanism import Geometry, Tokens
from farfield.attention.state import DecodingState

__all__ = ["Attention", "DecodingState", "Geometry", "Tokens", "mechanisms"]
