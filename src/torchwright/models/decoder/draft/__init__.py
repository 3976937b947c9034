"""Draft models: they propose tokens that a decoder verifies, and keep their keys and values in its pages."""

from torchwright.models.decoder.draft.draft import Draft
from torchwright.models.decoder.draft.load import load_draft

__all__ = ["Draft", "load_draft"]
