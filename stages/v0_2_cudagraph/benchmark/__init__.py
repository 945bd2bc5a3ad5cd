"""The parts of `bench_serving` and `bench_latency`. Only `static_batch` knows the engine; the rest imports no torch."""
