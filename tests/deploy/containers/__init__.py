"""The image and the templates, deployed: containers on a local AWS with signatures and policies.

`make test-deploy` runs these tests; `make test` does not, because they build an image.
"""
