"""Drop-in modules for flax linen, flax nnx, equinox and Keras, one file each.

Each file imports its framework, so import only the file for the framework that you use, as in
`from pallas_patch_embed.frameworks import nnx`. The package depends on none of the frameworks.
"""
