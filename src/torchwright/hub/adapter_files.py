"""The files of an adapter, as peft names them. No torch here."""

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
