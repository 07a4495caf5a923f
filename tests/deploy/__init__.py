"""Tests of the files in deploy/: settings of containers, templates, the image and its checks."""
