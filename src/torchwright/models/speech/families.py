"""Which families of speech models there are, by `model_type` of config.json, and where each one is. No torch here."""

FAMILIES = {
    "whisper": "torchwright.models.speech.whisper.model:Whisper",
    "moonshine": "torchwright.models.speech.moonshine.model:Moonshine",
}
"""To add one, write a `Recognizer` and put it here."""
