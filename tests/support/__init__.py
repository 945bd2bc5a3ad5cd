"""Tests of the stages' support folders, which are the same in all of them."""
