"""Language models without a native family: transformers' own modules over the paged cache, or one answer at a time."""
