"""Tests of what is deployed: settings of containers, the templates, the image and its checks."""
