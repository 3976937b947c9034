"""Contract tests: what every technique, workload, engine and device must keep, whoever wrote it.

pytest --pyargs torchwright.testing               all that are registered; speech and diffusion need this project's tests
pytest --pyargs torchwright.testing -k my_name    one of them
"""
