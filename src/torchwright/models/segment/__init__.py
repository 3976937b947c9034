"""Segmentation: reading pictures, one module per model family, prompts, all objects of a picture, masks as files.

model = load_segmenter(folder)                     any SAM or SAM 2 folder of transformers
model.segment("cat.jpg", points=[(400, 650)])      the object at a place, or in a box
model.everything("cat.jpg")                        every object that a grid of points finds
"""
