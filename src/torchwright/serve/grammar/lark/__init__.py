"""Grammars in Lark's syntax, as guidance and other clients of vLLM send them."""
