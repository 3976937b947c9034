"""Answers that need no engine: the token ids of a text or conversation, and back."""

from __future__ import annotations

import msgspec

from torchwright.serve.openai.anthropic_request import CountTokensRequest
from torchwright.serve.openai.conversation import Tools
from torchwright.serve.openai.language import Language, Prompts
from torchwright.serve.openai.picture_prompt import prompt_of
from torchwright.serve.openai.protocol import DetokenizeRequest, TokenizeRequest
from torchwright.serve.openai.request_limits import RequestLimits, check_ids, check_text

Asked = TokenizeRequest | DetokenizeRequest | CountTokensRequest


def answer(body: Asked, language: Language, limits: RequestLimits, most: int) -> bytes:
    """The answer as JSON; at most `most` characters are tokenized. Raises `ApiError` (400)."""
    tokenizer = language.tokenizer
    if isinstance(body, DetokenizeRequest):
        check_ids(body.tokens, limits, "tokens")
        return msgspec.json.encode({"prompt": tokenizer.decode(body.tokens, special=True)})
    if isinstance(body, CountTokensRequest):
        prompts = body.read(language)
        [text] = prompts.items
        assert isinstance(text, str), "a conversation is a text"
        check_text(text, tokenizer, None, most, prompts.param)
        return msgspec.json.encode({"input_tokens": len(prompts.encode(text, tokenizer))})
    if body.messages is not None:
        asked = Tools(functions=[tool.function for tool in body.tools or []], choice="auto")
        start, extra = body.add_generation_prompt, body.chat_template_kwargs
        prompts = prompt_of(
            language, body.messages, asked, "messages", add_generation_prompt=start, extra=extra
        )
    else:
        prompts = Prompts([body.prompt or ""], "prompt", special=body.add_special_tokens)
    [text] = prompts.items
    assert isinstance(text, str), "a conversation is a text"
    check_text(text, tokenizer, None, most, prompts.param)
    ids = prompts.encode(text, tokenizer)
    strings = [tokenizer.token(id)[0] for id in ids] if body.return_token_strs else None
    return msgspec.json.encode(
        {"count": len(ids), "max_model_len": limits.context, "tokens": ids, "token_strs": strings}
    )
