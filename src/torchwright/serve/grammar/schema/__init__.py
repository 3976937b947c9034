"""JSON schemas turned into grammars that allow nothing which the schema forbids, or refused by keyword."""
