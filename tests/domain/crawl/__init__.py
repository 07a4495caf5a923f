"""Tests of conveyor/domain/crawl."""
