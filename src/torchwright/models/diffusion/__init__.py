"""Pictures from text: a pipeline's folder, its parts as one module, and the sampler that calls them.

Each folder is diffusers' own: model_index.json and a folder for each component.
"""
