"""Model folders and files as the hub has them: their tensors by name, quantized ones made wide as they are read.

checkpoint = Checkpoint(folder, config)       its format chosen by `quantization_config` of config.json
weight = checkpoint.weight(name, shape)       float rows, a few at a time; or the integers that they come from
folder = opened(path)                         a GGUF file as a folder with config.json and tokenizer
tokenizer = open_tokenizer(folder)            from its tokenizer.json
"""
