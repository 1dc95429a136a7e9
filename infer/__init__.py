"""The inference program: `python -m infer COMMAND ...`.

It depends on the library `layerskip` and never on the program `train`. Modules that hold a command's flags
import neither torch nor transformers, so that help and errors come at once; what decodes is imported when a
command runs.
"""
