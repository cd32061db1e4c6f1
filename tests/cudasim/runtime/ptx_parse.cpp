// PTX text -> kernels -> instructions.
#include <algorithm>
#include <cctype>
#include <cstring>
#include <regex>
#include <string_view>

#include "ptx.h"

namespace sim::ptx {
namespace {

std::string trim(std::string_view text) {
  std::string words;  // single spaces, as errors quote them
  for (const char c : text) {
    if (!isspace(static_cast<unsigned char>(c))) {
      words += c;
    } else if (!words.empty() && words.back() != ' ') {
      words += ' ';
    }
  }
  if (!words.empty() && words.back() == ' ') words.pop_back();
  return words;
}

std::string without_comments(const std::string& text) {
  std::string kept;
  for (size_t i = 0; i < text.size();) {
    if (text.compare(i, 2, "//") == 0) {
      i = std::min(text.find('\n', i), text.size());
    } else if (text.compare(i, 2, "/*") == 0) {
      i = std::min(text.find("*/", i), text.size() - 2) + 2;
    } else {
      kept += text[i++];
    }
  }
  // Line information has no semicolons.
  static const std::regex lines("(^|\n)[ \t]*\\.(loc|file)\\b[^\n]*");
  return text.find(".loc") == std::string::npos ? kept : std::regex_replace(kept, lines, "\n");
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  for (const char c : text) {
    depth += c == '{' || c == '[' || c == '(';
    depth -= c == '}' || c == ']' || c == ')';
    if (c == separator && depth == 0) {
      parts.push_back(trim(part));
      part.clear();
    } else {
      part += c;
    }
  }
  if (!trim(part).empty()) parts.push_back(trim(part));
  return parts;
}

bool is_name(char c) { return isalnum(static_cast<unsigned char>(c)) || strchr("_$%.", c); }

// Reads the declarations of shared memory and of parameters: `.align 16 .b8 name[64]`.
struct Variable {
  std::string name;
  size_t align = 1, size = 0;
};
Variable variable(const std::string& text) {
  static const std::regex shape(
      R"((?:.*\.align (\d+))?.*?\.[busf](\d+)[^,\[]*? ?([\w$]+)((?:\[\d*\])*))");
  std::smatch m;
  if (!std::regex_match(text, m, shape)) throw Unsupported(text);
  Variable v{m[3], 0, std::stoul(m[2]) / 8};
  v.align = m[1].matched ? std::stoul(m[1]) : v.size;
  const std::string dims = m[4];
  static const std::regex dim(R"(\[(\d*)\])");
  for (std::sregex_iterator it(dims.begin(), dims.end(), dim), end; it != end; ++it) {
    v.size *= (*it)[1].length() ? std::stoul((*it)[1]) : 0;
  }
  return v;
}

void declare_shared(const std::string& text, Kernel& kernel) {
  const Variable v = variable(text);
  const size_t offset = (kernel.shared_bytes + v.align - 1) / v.align * v.align;
  kernel.symbols[v.name] = offset;
  kernel.shared_bytes = offset + v.size;
}

class Parser {
 public:
  explicit Parser(Kernel& kernel) : kernel_(kernel), scopes_(1) {}

  void run() {
    const std::string& body = kernel_.body;
    for (size_t at = 0; at < body.size();) {
      if (isspace(static_cast<unsigned char>(body[at])) || body[at] == ';') {
        ++at;
      } else if (body[at] == '{') {
        scopes_.emplace_back();
        ++at;
      } else if (body[at] == '}') {
        scopes_.pop_back();
        ++at;
      } else {
        at = statement(at);
      }
    }
    for (Instruction& i : kernel_.code) {
      if (i.flow == Flow::kBranch) i.target = labels_.at(i.args.at(0).name);
    }
  }

 private:
  // Reads a label or a statement from `at` on; where the next one begins.
  size_t statement(size_t at) {
    const std::string& body = kernel_.body;
    size_t end = at;
    while (end < body.size() && is_name(body[end])) ++end;
    if (end < body.size() && body[end] == ':' && body[end + 1] != ':') {
      labels_[body.substr(at, end - at)] = static_cast<int>(kernel_.code.size());
      return end + 1;
    }
    end = body.find(';', at);
    if (end == std::string::npos) throw Unsupported(trim(body.substr(at, 80)));
    const std::string text = trim(std::string_view(body).substr(at, end - at));
    if (text.starts_with(".reg")) {
      declare_registers(text);
    } else if (text.starts_with(".shared")) {
      declare_shared(text, kernel_);
    } else if (text[0] == '.' && !text.starts_with(".pragma")) {
      throw Unsupported(text);
    } else if (text[0] != '.') {
      instruction(text);
    }
    return end + 1;
  }

  void declare_registers(const std::string& text) {
    static const std::regex shape(R"(\.reg \.(pred|[bfsu](\d+)) (.*))");
    static const std::regex item(R"(([%$\w]+)(?:<(\d+)>)?)");
    std::smatch m, n;
    if (!std::regex_match(text, m, shape)) throw Unsupported(text);
    const int bits = m[2].matched ? std::stoi(m[2]) : 1;
    for (const std::string& name : split(m[3], ',')) {
      if (!std::regex_match(name, n, item)) throw Unsupported(text);
      const int count = n[2].matched ? std::stoi(n[2]) : 0;
      if (!count) add_register(n[1], bits);
      for (int i = 0; i < count; ++i) add_register(n[1].str() + std::to_string(i), bits);
    }
  }

  void add_register(const std::string& name, int bits) {
    scopes_.back()[name] = static_cast<int>(kernel_.register_bits.size());
    kernel_.register_bits.push_back(bits);
  }

  void instruction(const std::string& text) {
    Instruction i;
    i.text = text;
    std::string rest = text;
    if (rest[0] == '@') {
      i.negated = rest[1] == '!';
      const size_t space = rest.find(' ');
      const Operand p = operand(rest.substr(1 + i.negated, space - 1 - i.negated));
      i.predicate = p.index;
      rest = rest.substr(space + 1);
    }
    const size_t space = std::min(rest.find(' '), rest.size());
    std::string name = rest.substr(0, space);
    for (size_t at = 0; (at = name.find("::", at)) != std::string::npos;) name.replace(at, 2, "__");
    i.op = split(name, '.');
    for (const std::string& arg : split(rest.substr(space), ',')) i.args.push_back(operand(arg));
    bind(i, kernel_);
    kernel_.code.push_back(std::move(i));
  }

  std::vector<Operand> operands(const std::string& text, char separator) {
    std::vector<Operand> list;
    for (const std::string& part : split(text, separator)) list.push_back(operand(part));
    return list;
  }

  Operand operand(const std::string& text) {
    Operand o;
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (auto found = scope->find(text); found != scope->end()) {
        o.kind = OperandKind::kRegister;
        o.index = found->second;
        return o;
      }
    }
    const std::string inner = text.size() > 2 ? text.substr(1, text.size() - 2) : "";
    if (text[0] == '{') {
      o.kind = OperandKind::kVector;
      o.parts = operands(inner, ',');
    } else if (text[0] == '[') {
      return address(inner);
    } else if (text[0] == '!') {
      o = operand(text.substr(1));
      o.inverted = true;
    } else if (text.find('|') != std::string::npos) {
      o.kind = OperandKind::kVector;
      o.parts = operands(text, '|');
    } else if (text != "_") {
      return value(text);
    }
    return o;
  }

  Operand address(const std::string& text) {
    Operand o;
    o.kind = OperandKind::kAddress;
    const size_t plus = text.find('+');
    o.parts.push_back(operand(trim(text.substr(0, plus))));
    if (plus != std::string::npos) {
      o.bits = static_cast<uint64_t>(std::stoll(trim(text.substr(plus + 1)), nullptr, 0));
    }
    return o;
  }

  // Numbers, symbols, special registers, labels.
  Operand value(const std::string& text) {
    Operand o;
    o.kind = OperandKind::kImmediate;
    const bool is_float_bits = text[0] == '0' && text.size() > 2 && strchr("fFdD", text[1]);
    if (is_float_bits && (text.size() == 10 || text.size() == 18)) {
      o.bits = std::stoull(text.substr(2), nullptr, 16);
    } else if (isdigit(static_cast<unsigned char>(text[0])) || text[0] == '-') {
      o.bits = text[0] == '-' ? static_cast<uint64_t>(std::stoll(text, nullptr, 0))
                              : std::stoull(text, nullptr, 0);
    } else if (text == "WARP_SZ") {
      o.bits = kLanes;
    } else if (auto symbol = kernel_.symbols.find(text); symbol != kernel_.symbols.end()) {
      o.bits = symbol->second;
    } else if (text[0] == '%') {
      o.kind = OperandKind::kSpecial;
      o.index = special(text);
    } else {
      o.kind = OperandKind::kLabel;
      o.name = text;
    }
    return o;
  }

  static int special(const std::string& text) {
    static const std::map<std::string, Special> known = {
        {"%tid", Special::kTid},           {"%ntid", Special::kNtid},   {"%ctaid", Special::kCtaid},
        {"%nctaid", Special::kNctaid},     {"%laneid", Special::kLane}, {"%warpid", Special::kWarp},
        {"%clock64", Special::kClock},     {"%clock", Special::kClock}, {"%smid", Special::kZero},
        {"%globaltimer", Special::kClock},
    };
    const size_t dot = text.find('.');
    const auto found = known.find(text.substr(0, dot));
    if (found == known.end()) throw Unsupported(text);
    return static_cast<int>(found->second) + (dot == std::string::npos ? 0 : text[dot + 1] - 'x');
  }

  Kernel& kernel_;
  std::vector<std::map<std::string, int>> scopes_;  // registers by name
  std::map<std::string, int> labels_;
};

size_t closing_brace(const std::string& text, size_t open) {
  int depth = 0;
  for (size_t at = open; at < text.size(); ++at) {
    depth += text[at] == '{';
    depth -= text[at] == '}';
    if (depth == 0) return at;
  }
  throw Unsupported("a kernel without end");
}

// `head` is what is between .entry and the body.
Kernel read_head(const std::string& head) {
  Kernel kernel;
  const size_t open = head.find('(');
  kernel.name = trim(head.substr(0, open));
  size_t offset = 0, close = open;
  if (open != std::string::npos) {
    close = head.find(')', open);
    for (const std::string& text : split(head.substr(open + 1, close - open - 1), ',')) {
      const Variable v = variable(text);
      offset = (offset + v.align - 1) / v.align * v.align;
      kernel.symbols[v.name] = offset;
      kernel.parameters.push_back({offset, v.size});
      offset += v.size;
    }
  }
  static const std::regex limit(R"(\.(?:maxntid|reqntid)\s+(\d+))");
  std::smatch m;
  const std::string rest = close == std::string::npos ? head : head.substr(close);
  if (std::regex_search(rest, m, limit)) {
    kernel.max_threads = static_cast<unsigned>(std::stoul(m[1]));
  }
  return kernel;
}

}  // namespace

bool Instruction::has(const char* modifier) const {
  return std::find(op.begin() + 1, op.end(), modifier) != op.end();
}

void Kernel::parse() {
  if (!code.empty()) return;
  Parser(*this).run();
  // Threads that run off the end have returned.
  Instruction end;
  end.text = "ret";
  end.op = {"ret"};
  end.flow = Flow::kReturn;
  code.push_back(std::move(end));
}

Module parse_module(const std::string& raw) {
  Module kernels;
  const std::string text = without_comments(raw);
  for (size_t at = 0; (at = text.find(".entry", at)) != std::string::npos;) {
    const size_t open = text.find('{', at), close = closing_brace(text, open);
    Kernel kernel = read_head(text.substr(at + 6, open - at - 6));
    kernel.body = text.substr(open + 1, close - open - 1);
    kernels.emplace(kernel.name, std::move(kernel));
    at = close;
  }
  return kernels;
}

bool is_type(const std::string& modifier) {
  static const std::regex shape("[usbf](8|16|32|64)|pred");
  return std::regex_match(modifier, shape);
}

Type type_of(const Instruction& instruction, int from_the_end) {
  const int at = static_cast<int>(instruction.op.size()) - from_the_end;
  if (at < 1 || !is_type(instruction.op[at])) throw Unsupported(instruction.text);
  const std::string& modifier = instruction.op[at];
  if (modifier == "pred") return {'p', 1};
  return {modifier[0], std::stoi(modifier.substr(1))};
}

void expect(const Instruction& i, std::initializer_list<const char*> known, int types) {
  for (size_t at = 1; at + types < i.op.size(); ++at) {
    if (std::find(known.begin(), known.end(), i.op[at]) == known.end()) throw Unsupported(i.text);
  }
}

}  // namespace sim::ptx
