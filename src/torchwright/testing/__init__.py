"""Contract tests: what every technique, workload, engine and device must keep, whoever wrote it.

pytest --pyargs torchwright.testing               all that are registered, but for a few whose example is a test's
pytest --pyargs torchwright.testing -k my_name    one of them
"""
