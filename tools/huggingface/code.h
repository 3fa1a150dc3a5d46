// The Python files of an exported NSA model; the build embeds them in the program.
#pragma once

namespace triad {

// The contents of tools/huggingface/configuration_triad.py and modeling_triad.py.
extern const char* const kConfigurationTriad;
extern const char* const kModelingTriad;

}  // namespace triad
