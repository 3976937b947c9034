"""Contract tests: what every technique, workload, engine and device must keep, whoever wrote it.

pytest --pyargs torchwright.testing               all that are registered, built-in or from a package
pytest --pyargs torchwright.testing -k my_name    one of them
"""
