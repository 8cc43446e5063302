"""Drop-in modules for flax linen, flax nnx, equinox and Keras, one file each.

Each file imports its framework, so import the one that you use:
`from pallas_patch_embed.frameworks import nnx`. The package depends on none of them.
"""
