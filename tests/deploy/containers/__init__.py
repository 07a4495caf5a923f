"""Tests of the image and the templates: containers on a local AWS that checks signatures and
policies.

`make test-deploy` runs these tests; `make test` does not, because they build an image.
"""
