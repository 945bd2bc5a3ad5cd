"""ONE suite for all stages: the tests here run once per stage, over `strata.adapters`."""
