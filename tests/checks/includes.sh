#!/usr/bin/env bash
# Checks that a file includes each standard header whose names it uses, directly or through headers of this tree. Which
# standard headers include each other differs between versions of the library.
#   tests/checks/includes.sh SOURCE_FOLDER
cd "${1:?the source folder}" || exit 1
# header [alternative header]: an extended regular expression of the names that need it
uses=$(cat <<'TABLE'
algorithm: std::(min|max|sort|stable_sort|find|find_if|any_of|all_of|none_of|count|count_if|copy|copy_n|copy_if|fill|fill_n|transform|equal|lower_bound|upper_bound|clamp|(min|max|minmax)_element|reverse|nth_element|partial_sort|unique|shuffle|mismatch|generate|rotate|binary_search|is_sorted|replace|remove_if|search)\(
array: std::array<
atomic: std::atomic|std::memory_order
bit: std::(bit_cast|popcount|countr_zero|countl_zero|has_single_bit|bit_ceil|bit_width|endian)
cctype: std::(isspace|isdigit|isalpha|isalnum|isprint|isupper|islower|toupper|tolower|isxdigit|ispunct)\(
cerrno: (^|[^_a-zA-Z])errno([^_a-zA-Z]|$)
charconv: std::(from|to)_chars
chrono: std::chrono
cmath: std::(sqrt|exp|exp2|log|log2|log10|pow|fabs|isfinite|isnan|isinf|floor|ceil|round|lround|llround|cos|sin|tanh|hypot|log1p|expm1|fma|nextafter|ldexp|frexp|lrint|nearbyint|trunc|fmod|signbit|erf|cbrt|nearbyint)f?\(
complex: std::complex
condition_variable: std::condition_variable
csignal signal.h: std::(signal|raise|sig_atomic_t)([^a-z_]|$)
cstddef: std::(byte|nullptr_t|max_align_t|ptrdiff_t)([^a-z_]|$)
cstdint stdint.h: (^|[^_a-zA-Z])(u?int(8|16|32|64|max|ptr)_t)
cstdio: std::(printf|fprintf|fputs|fputc|fflush|snprintf|FILE|fopen|fclose|fread|fwrite|remove|rename|sscanf|puts|putchar|perror|ferror|fileno|setvbuf)([^a-z_]|$)
cstdlib: std::(getenv|atoi|atol|atof|strtol|strtoll|strtoull|strtod|free|malloc|calloc|aligned_alloc|exit|abort|system|atexit|_Exit|quick_exit|mkstemp)\(
cstring: std::(memcpy|memset|memcmp|memmove|memchr|strerror|strlen|strcmp|strncmp|strstr|strchr|strrchr)\(
ctime: std::(time|time_t|tm|strftime|gmtime|localtime|mktime)([^a-z_]|$)
deque: std::deque<
exception: std::(exception_ptr|current_exception|rethrow_exception|make_exception_ptr|uncaught_exceptions|terminate|set_terminate)
filesystem: std::filesystem
fstream: std::(i|o|)fstream
functional: std::(function|greater|less|bind|hash|invoke|plus|multiplies)([^a-z_]|$)
future: std::(future|promise|async|packaged_task)([^a-z_]|$)
initializer_list: std::initializer_list|for \([^;]* : \{
iomanip: std::(setw|setprecision|setfill|hex|put_time|get_time)([^a-z_]|$)
iostream: std::(cout|cerr|cin)([^a-z_]|$)
iterator: std::(back_inserter|istreambuf_iterator|ostreambuf_iterator|istream_iterator|make_move_iterator|inserter)|std::(distance|advance)\(
limits: std::numeric_limits
list: std::list<
map: std::(multi)?map<
memory: std::(unique_ptr|shared_ptr|weak_ptr|make_unique|make_shared|enable_shared_from_this|addressof|align)([^a-z_]|$)
mutex: std::(mutex|recursive_mutex|lock_guard|unique_lock|scoped_lock|once_flag|call_once)([^a-z_]|$)
numbers: std::numbers
numeric: std::(accumulate|iota|gcd|lcm|inner_product|partial_sum|reduce|exclusive_scan|inclusive_scan|midpoint)\(
optional: std::(optional|nullopt)
queue: std::(priority_)?queue<
random: std::(mt19937|uniform_(int|real)_distribution|normal_distribution|random_device|bernoulli_distribution)
regex: std::(regex|smatch|cmatch|sregex_iterator|regex_search|regex_match|regex_replace)
set: std::(multi)?set<
shared_mutex: std::(shared_mutex|shared_lock)
span: std::(span|as_bytes|as_writable_bytes)([^a-z_]|$)
sstream: std::(i|o|)stringstream
stdexcept: std::(runtime_error|logic_error|invalid_argument|out_of_range|domain_error|length_error)
stop_token thread: std::(stop_token|stop_source|jthread)
string: std::(string|to_string|stoi|stol|stoll|stoull|stod|stof|getline|u32string|char_traits)([^a-z_]|$)
string_view: std::(u8|u16|u32)?string_view
system_error: std::(error_code|system_error|errc|generic_category|system_category)
thread: std::(thread|this_thread)([^a-z_]|$)
tuple: std::(tuple|tie|make_tuple|apply|ignore)([^a-z_]|$)
type_traits: std::(is_same|is_same_v|is_floating_point|is_floating_point_v|is_integral|is_integral_v|conditional_t|decay_t|enable_if_t|remove_cvref_t|remove_reference_t|remove_const_t|invoke_result_t|is_trivially_copyable_v|underlying_type_t|is_enum_v|is_base_of_v|is_convertible_v|is_invocable_v|void_t|true_type|false_type|is_signed_v|is_unsigned_v|make_unsigned_t|make_signed_t|is_pointer_v|is_const_v)
unordered_map: std::unordered_(multi)?map<
unordered_set: std::unordered_(multi)?set<
utility: std::(move|pair|swap|exchange|forward|make_pair|declval|index_sequence|make_index_sequence|as_const|in_place|cmp_less)([^a-z_]|$)
variant: std::(variant|visit|get_if|holds_alternative|monostate)([^a-z_]|$)
vector: std::vector<
fmt/format.h fmt/core.h: fmt::(format|print|format_to|vformat|runtime|format_string|memory_buffer)([^a-z_]|$)
TABLE
)
find engine io kernels model train tools tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | sort |
  USES=$uses awk '
    BEGIN {
      n = split(ENVIRON["USES"], row, "\n")
      for (i = 1; i <= n; ++i) {
        at = index(row[i], ": ")
        header[i] = substr(row[i], 1, at - 1)
        pattern[i] = substr(row[i], at + 2)
      }
    }
    function reaches(file, wanted, seen,    k, parts, count) {  # whether the file, or a header of the tree that it includes, includes a wanted header
      if (file in seen) return 0
      seen[file] = 1
      count = split(wanted, parts, " ")
      for (k = 1; k <= count; ++k)
        if ((file, parts[k]) in includes) return 1
      count = split(own[file], parts, "\n")
      for (k = 1; k < count; ++k)
        if (reaches(parts[k], wanted, seen)) return 1
      return 0
    }
    {
      file = $0
      all[++files] = file
      text = ""
      while ((getline line < file) > 0) {
        if (match(line, /^#include <[^>]*>/)) includes[file, substr(line, 11, RLENGTH - 11)] = 1
        else if (match(line, /^#include "[^"]*"/)) own[file] = own[file] substr(line, 11, RLENGTH - 11) "\n"
        else {
          sub(/(^|[^:])\/\/.*/, "", line)
          gsub(/"([^"\\]|\\.)*"/, "\"\"", line)
          text = text line "\n"
        }
      }
      close(file)
      for (i = 1; i <= n; ++i)
        if (text ~ pattern[i]) used[file, i] = 1
    }
    END {
      for (f = 1; f <= files; ++f)
        for (i = 1; i <= n; ++i)
          if ((all[f], i) in used) {
            split("", seen)
            if (!reaches(all[f], header[i], seen)) {
              split(header[i], first, " ")
              print all[f] " lacks #include <" first[1] ">"
              bad = 1
            }
          }
      if (!bad) print "every file includes what it uses of the standard library"
      exit bad
    }'
