"""What recognizers share with other encoders and decoders."""

from torchwright.decoder.precision import SIDES, Precision, read_precision

__all__ = ["SIDES", "Precision", "read_precision"]
