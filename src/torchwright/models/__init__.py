"""Model families that Torchwright runs itself: language models, speech, segmentation, diffusion."""
