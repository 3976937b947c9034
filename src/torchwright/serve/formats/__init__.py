"""How families of models write reasoning and tool calls: one table each, their parsers and their grammars."""
