"""Formats of reasoning and tool calls by model family: one table each, their parsers and grammars."""
