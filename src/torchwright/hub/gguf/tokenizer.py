"""tokenizer.json from a GGUF file's metadata: byte-level BPE ("gpt2") and SentencePiece's BPE by score ("llama")."""

from __future__ import annotations

from typing import Any

from torchwright.core.errors import ModelError
from torchwright.hub.fields import Fields
from torchwright.hub.gguf.header import Header

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Kinds of tokens that text is searched for whole, or never written as."""
SPACE = "\u2581"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
SEED = QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE, REST = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = rf"{BEFORE}{UPPER}*{LOWER}+{SHORT}|{BEFORE}{UPPER}+{LOWER}*{SHORT}|\p{{N}}{{1,3}}{REST}"
TEKKEN = rf"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*|\p{{N}}{REST}"
SPLITS = {
    **dict.fromkeys(("gpt-2", "smollm", "refact", "starcoder", "exaone"), GPT2),
    **dict.fromkeys(("olmo", "phi-2", "exaone4", "granite-docling"), GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"), LLAMA3),
    **dict.fromkeys(("falcon3", "pixtral", "glm4", "chatglm-bpe", "lfm2"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
    "qwen35": QWEN35,
    "gpt-4o": GPT4O,
    "tekken": TEKKEN,
    "seed-coder": SEED,
}
"""`tokenizer.ggml.pre` → how text is cut into words, as the models' own tokenizers do."""
DIGITS = ("smollm", "refact", "starcoder", "exaone")
"""The pre-tokenizers that cut numbers into digits."""
COMPOSED = ("qwen2", "deepseek-r1-qwen", "qwen35")
"""Those whose text is brought into Unicode's composed form (NFC) first."""
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3", "pixtral", "glm4", "tekken", "lfm2")
"""Those that take a word of the vocabulary as a token, even if merges would build another one."""
WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3", "pixtral", "tekken", "lfm2")
"""Those whose texts begin with the begin-of-text token where a file does not say."""


def tokenizer_of(header: Header) -> tuple[str, dict[str, Any]]:
    """The text of tokenizer.json, and tokenizer_config.json.

    Raises `ModelError`, naming file and key, for a kind of tokenizer that is not read here.
    """
    metadata = Fields(header.path, header.metadata, "")
    kind, pre = metadata.text("tokenizer.ggml.model", ""), metadata.text("tokenizer.ggml.pre", "")
    if kind not in ("gpt2", "llama"):
        raise metadata.wrong("tokenizer.ggml.model", "gpt2 or llama")
    if kind == "gpt2" and pre not in SPLITS:
        raise metadata.wrong("tokenizer.ggml.pre", ", ".join(SPLITS))
    tokens = _texts(metadata, "tokenizer.ggml.tokens")
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens)) or [1] * len(tokens)
    special = {
        name: tokens[token]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (token := _id(metadata, key, len(tokens))) is not None
    }
    adds_bos = metadata.flag("tokenizer.ggml.add_bos_token", kind == "llama" or pre in WITH_BOS)
    adds_eos = metadata.flag("tokenizer.ggml.add_eos_token", False)
    try:
        tokenizer = (
            _bpe(metadata, tokens, pre) if kind == "gpt2" else _spm(metadata, tokens, special.get("unk"))
        )
        _add(tokenizer, tokens, types)
        around = (
            [special["bos"]] * (adds_bos and "bos" in special),
            [special["eos"]] * (adds_eos and "eos" in special),
        )
        _surround(tokenizer, *around)
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(
            f"{header.path} has no tokenizer that can be made", found=str(error)[:300]
        ) from error
    config = {f"{name}_token": text for name, text in special.items()}
    templates = _templates(metadata)
    return tokenizer.to_str(), {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos and "bos" in special,
        **config,
        **({"chat_template": templates} if templates else {}),
    }


def _bpe(metadata: Fields, tokens: list[str], pre: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [_pair(text) for text in _texts(metadata, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in WHOLE_WORDS))
    if pre in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *([pre_tokenizers.Digits(individual_digits=True)] if pre in DIGITS else []),
            pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _spm(metadata: Fields, tokens: list[str], unknown: str | None) -> Any:
    """SentencePiece merges whichever neighbours make the token with the best score: merges in the order of scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _numbers(metadata, "tokenizer.ggml.scores", len(tokens))
    if scores is None:
        raise metadata.wrong("tokenizer.ggml.scores", "one number for each token")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [
        (-scores[index], index, vocabulary[left], vocabulary[right], left, right)
        for token, index in vocabulary.items()
        for left, right in ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        if left in vocabulary and right in vocabulary
    ]
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend(SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefixed else []),
        ]
    )
    return tokenizer


def _add(tokenizer: Any, tokens: list[str], types: list[int]) -> None:
    """Tokens that are never cut: control tokens, which texts show nothing of, and those that a user defined."""
    from tokenizers import AddedToken

    both = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in both if kind in (UNKNOWN, CONTROL) and token]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in both if kind == USER_DEFINED and token]
    )


def _surround(tokenizer: Any, before: list[str], after: list[str]) -> None:
    """Tokens around every text."""
    from tokenizers.processors import TemplateProcessing

    if before or after:
        names = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(before + after)]
        tokenizer.post_processor = TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B", *after],
            special_tokens=names,
        )


def _templates(metadata: Fields) -> str | list[dict[str, str]]:
    """The chat template; several by name where a file has several."""
    default = metadata.text("tokenizer.chat_template", "")
    names = metadata.data.get("tokenizer.chat_templates") or []
    named = [
        {"name": name, "template": metadata.text(f"tokenizer.chat_template.{name}", "")}
        for name in names
        if isinstance(name, str)
    ]
    return [{"name": "default", "template": default}, *named] if named else default


def _texts(metadata: Fields, key: str) -> list[str]:
    found = metadata.data.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(text, str) for text in found):
        raise metadata.wrong(key, "a list of texts")
    return found


def _numbers(metadata: Fields, key: str, length: int) -> list[Any] | None:
    found = metadata.data.get(key)
    if found is None:
        return None
    good = isinstance(found, list) and all(isinstance(value, int | float) for value in found)
    if not good or len(found) != length:
        raise metadata.wrong(key, f"a list of {length} numbers, one for each token")
    return found


def _id(metadata: Fields, name: str, tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if metadata.data.get(key) is None:
        return None
    token = metadata.integer(key, minimum=0)
    if token >= tokens:
        raise metadata.wrong(key, f"one of the {tokens} tokens")
    return token


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ValueError(f"the merge {merge[:80]!r} is no pair")
    return left, right
