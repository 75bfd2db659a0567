"""Speed and memory of sdpa beside its peers and beside what the machine can do.

python -m benchmarks --help
"""
