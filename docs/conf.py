"""Settings of Sphinx. Build the site with `uv run sphinx-build -W -b html docs docs/_build`."""

project = "Hopper training kernels"
html_title = project
extensions = ["myst_parser"]
html_theme = "furo"
exclude_patterns = ["_build"]

# The READMEs that pages include have links to their own headings. Their links to files, as ../../benches/plots/a.svg,
# need nothing: a page lies as deep in the repository as the README in it.
myst_heading_anchors = 3
# Blocks without a language are commands.
highlight_language = "text"
