"""Tests of the stage's load tools: `bench_serving` and `bench_latency`."""
