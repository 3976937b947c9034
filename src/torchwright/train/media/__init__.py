"""Image classifiers and speech recognizers of transformers, trained on files of pictures and of sound."""
