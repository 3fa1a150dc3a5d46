// An exported NSA model's Python files; the build embeds them in the program.
#pragma once

namespace triad {

// Contents of tools/huggingface/configuration_triad.py and modeling_triad.py.
extern const char* const kConfigurationTriad;
extern const char* const kModelingTriad;

}  // namespace triad
