"""Write model.gguf and mmproj.gguf of a vision folder with random weights, by llama.cpp's own converter.

    python -m benchmarks.llm.vision_gguf SOURCE FOLDER OUT [--quantize q8_0]

SOURCE is llama.cpp's source, such as vendor/llama.cpp in llama-cpp-python's source distribution. The converter knows a
tokenizer by the hash of what it makes of a text. It does not know that of `picture_files.py`, which is named here.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import run

PRE = "qwen2"


def main() -> None:
    options = run.options(__doc__, "source", "folder", "out", json=False, quantize="q8_0")
    source, out = Path(options.source), Path(options.out)
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    base: Any = importlib.import_module("conversion.base")
    converter: Any = importlib.import_module("convert_hf_to_gguf")
    for kind in (base.ModelBase, base.TextModel):
        if "get_vocab_base_pre" in vars(kind):
            kind.get_vocab_base_pre = lambda self, tokenizer: PRE
    out.mkdir(parents=True, exist_ok=True)
    for name, more in (("model.gguf", []), ("mmproj.gguf", ["--mmproj"])):
        words = [options.folder, "--outfile", str(out / name), "--outtype", options.quantize, *more]
        sys.argv = ["convert_hf_to_gguf.py", *words]
        converter.main()
    for file in sorted(out.glob("mmproj-*.gguf")):  # the converter puts a prefix before the name it is given
        file.rename(out / "mmproj.gguf")


if __name__ == "__main__":
    main()
