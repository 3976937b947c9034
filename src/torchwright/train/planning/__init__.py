"""Plans how a model is laid out over a cluster: memory and time of every layout that fits, and why others do not.

model and cluster and job → layouts by the divisibility rules → memory → time → ranking with reasons

No process group and no weights: models are shapes, devices a few published numbers.
"""
