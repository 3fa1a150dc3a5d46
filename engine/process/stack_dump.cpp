#include "engine/process/stack_dump.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <execinfo.h>
#include <fmt/format.h>
#include <link.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <system_error>
#include <vector>

namespace triad {

namespace {

// The request to one thread that is under way. It is global because the signal handler must find it.
constexpr int kMostFrames = 64;
struct Request {
  std::atomic<int> thread = 0;  // id of the thread to respond, which sets it to 0 when it begins
  int frames = 0;
  void* frame[kMostFrames];
  sem_t done;
};
Request request;

int stack_signal() { return SIGRTMIN + 3; }

extern "C" void note_stack(int) {
  const int error = errno;
  int self = static_cast<int>(syscall(SYS_gettid));
  if (request.thread.compare_exchange_strong(self, 0)) {
    request.frames = backtrace(request.frame, kMostFrames);
    sem_post(&request.done);
  }
  errno = error;
}

// The functions in the program's own file, including static ones, which dladdr() does not find. Empty if the file is
// stripped.
class ProgramSymbols {
 public:
  ProgramSymbols() {
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* base) {
          *static_cast<uintptr_t*>(base) = info->dlpi_addr;  // the first object in the list is the program
          return 1;
        },
        &base_);
    std::ifstream file("/proc/self/exe", std::ios::binary);
    Elf64_Ehdr header{};
    if (!read(file, 0, &header, 1) || header.e_shentsize != sizeof(Elf64_Shdr)) return;
    std::vector<Elf64_Shdr> sections(header.e_shnum);
    if (!read(file, header.e_shoff, sections.data(), sections.size())) return;
    for (const Elf64_Shdr& section : sections) {
      if (section.sh_type != SHT_SYMTAB || section.sh_link >= sections.size()) continue;
      const Elf64_Shdr& strings = sections[section.sh_link];
      std::vector<Elf64_Sym> symbols(section.sh_size / sizeof(Elf64_Sym));
      names_.resize(strings.sh_size);
      if (!read(file, section.sh_offset, symbols.data(), symbols.size()) ||
          !read(file, strings.sh_offset, names_.data(), names_.size()))
        return;
      for (const Elf64_Sym& s : symbols)
        if (ELF64_ST_TYPE(s.st_info) == STT_FUNC && s.st_size > 0 && s.st_name < names_.size())
          functions_.push_back({s.st_value, s.st_size, s.st_name});
    }
    std::sort(functions_.begin(), functions_.end(), [](auto& a, auto& b) { return a.begin < b.begin; });
  }

  // Returns the mangled name, or nullptr if the address is not in this program.
  const char* find(uintptr_t address) const {
    const uint64_t at = address - base_;
    auto it = std::upper_bound(functions_.begin(), functions_.end(), at,
                               [](uint64_t a, const Function& f) { return a < f.begin; });
    if (it == functions_.begin() || (--it, at >= it->begin + it->size)) return nullptr;
    return names_.data() + it->name;
  }

 private:
  struct Function {
    uint64_t begin, size;
    uint32_t name;
  };
  template <class T>
  static bool read(std::ifstream& file, uint64_t offset, T* to, size_t count) {
    file.seekg(static_cast<std::streamoff>(offset));
    return static_cast<bool>(file.read(reinterpret_cast<char*>(to), static_cast<std::streamsize>(count * sizeof(T))));
  }
  uintptr_t base_ = 0;
  std::vector<char> names_;
  std::vector<Function> functions_;
};

std::string readable(const char* mangled) {
  int status = 0;
  char* plain = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 ? plain : mangled;
  std::free(plain);
  constexpr size_t kMost = 160;  // characters; template names can be very long
  if (name.size() > kMost) name = name.substr(0, kMost) + "...";
  return name;
}

std::string describe(const ProgramSymbols& program, void* address) {
  // A return address is the one after the call, which may be a function's last instruction. The byte before it is in
  // the right function.
  const auto at = reinterpret_cast<uintptr_t>(address) - 1;
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(at), &info);
  const std::string file = info.dli_fname == nullptr ? "?" : std::filesystem::path(info.dli_fname).filename().string();
  const uintptr_t offset = at + 1 - reinterpret_cast<uintptr_t>(info.dli_fbase);
  const char* name = program.find(at);
  if (name == nullptr) name = info.dli_sname;
  return fmt::format("{}  [{}+{:#x}]", name == nullptr ? "?" : readable(name), file, offset);
}

std::string first_line(const std::string& path) {
  std::string line;
  std::getline(std::ifstream(path), line);
  return line;
}

// Waits for a response from the thread that was sent the signal; false if it has not begun to respond within a second.
bool wait_for_answer() {
  timespec until{};
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += 1;
  while (sem_timedwait(&request.done, &until) != 0)
    if (errno != EINTR) return request.thread.exchange(0) == 0 && sem_wait(&request.done) == 0;
  return true;
}

void append_thread(std::string& out, const ProgramSymbols& program, int thread) {
  const std::string folder = fmt::format("/proc/self/task/{}", thread);
  fmt::format_to(std::back_inserter(out), "\nthread {} \"{}\"{}\n", thread, first_line(folder + "/comm"),
                 thread == getpid() ? " (main)" : "");
  int frames = 0, skipped = 0;
  if (thread == static_cast<int>(syscall(SYS_gettid))) {
    frames = backtrace(request.frame, kMostFrames);
  } else {
    request.thread = thread;
    if (syscall(SYS_tgkill, getpid(), thread, stack_signal()) != 0 || !wait_for_answer()) {
      fmt::format_to(std::back_inserter(out), "  no answer; in the kernel: {}, system call {}\n",
                     first_line(folder + "/wchan"), first_line(folder + "/syscall"));
      return;
    }
    frames = request.frames;
    skipped = 2;  // frames of the signal handler and the kernel's signal trampoline
  }
  for (int i = skipped; i < frames; ++i)
    fmt::format_to(std::back_inserter(out), "  #{:<2} {}\n", i - skipped, describe(program, request.frame[i]));
}

}  // namespace

void prepare_stack_dumps() {
  static std::once_flag once;
  std::call_once(once, [] {
    sem_init(&request.done, 0, 0);
    void* frame[1];
    backtrace(frame, 1);  // the first call loads a library, which is not allowed in a signal handler
    struct sigaction action {};
    action.sa_handler = note_stack;
    action.sa_flags = SA_RESTART;
    sigaction(stack_signal(), &action, nullptr);
  });
}

std::string dump_stacks() {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  prepare_stack_dumps();
  const ProgramSymbols program;
  std::vector<int> threads;
  std::error_code gone;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", gone))
    threads.push_back(std::atoi(entry.path().filename().c_str()));
  std::sort(threads.begin(), threads.end());
  std::string out = fmt::format("{} threads\n", threads.size());
  for (const int thread : threads) append_thread(out, program, thread);
  return out;
}

}  // namespace triad
