/* Print what hookd takes from the kernel's headers on aarch64, as `name value`. */
#define _GNU_SOURCE
#include <asm/ptrace.h>
#include <elf.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/memfd.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define PRINT(name, value) printf("%s %llu\n", name, (unsigned long long)(value))
#define CALL(name) PRINT(#name, SYS_##name)

int main(void) {
    PRINT("registers", sizeof(struct user_pt_regs));
    PRINT("sp", offsetof(struct user_pt_regs, sp));
    PRINT("pc", offsetof(struct user_pt_regs, pc));
    PRINT("pstate", offsetof(struct user_pt_regs, pstate));
    PRINT("x30", offsetof(struct user_pt_regs, regs[30]));
    PRINT("branch type", PSR_BTYPE_MASK);
    PRINT("sve header", sizeof(struct user_sve_header));
    PRINT("iovec", sizeof(struct iovec));
    PRINT("iov_len", offsetof(struct iovec, iov_len));
    PRINT("NT_PRSTATUS", NT_PRSTATUS);
    PRINT("NT_PRFPREG", NT_PRFPREG);
    PRINT("NT_ARM_SVE", NT_ARM_SVE);
    PRINT("EM_AARCH64", EM_AARCH64);
    PRINT("symbol", sizeof(Elf64_Sym));
    PRINT("program header", sizeof(Elf64_Phdr));
    PRINT("AUDIT_ARCH_AARCH64", AUDIT_ARCH_AARCH64);
    PRINT("PTRACE_CONT", PTRACE_CONT);
    PRINT("PTRACE_DETACH", PTRACE_DETACH);
    PRINT("PTRACE_SYSCALL", PTRACE_SYSCALL);
    PRINT("PTRACE_GETREGSET", PTRACE_GETREGSET);
    PRINT("PTRACE_SETREGSET", PTRACE_SETREGSET);
    PRINT("PTRACE_SEIZE", PTRACE_SEIZE);
    PRINT("PTRACE_INTERRUPT", PTRACE_INTERRUPT);
    PRINT("PTRACE_GETSIGMASK", PTRACE_GETSIGMASK);
    PRINT("PTRACE_SECCOMP_GET_FILTER", PTRACE_SECCOMP_GET_FILTER);
    PRINT("PTRACE_O_TRACESYSGOOD", PTRACE_O_TRACESYSGOOD);
    PRINT("PTRACE_O_TRACEEXEC", PTRACE_O_TRACEEXEC);
    PRINT("PTRACE_EVENT_EXEC", PTRACE_EVENT_EXEC);
    PRINT("PTRACE_EVENT_STOP", PTRACE_EVENT_STOP);
    PRINT("read and write", PROT_READ | PROT_WRITE);
    PRINT("private anonymous", MAP_PRIVATE | MAP_ANONYMOUS);
    PRINT("MAP_FIXED", MAP_FIXED);
    PRINT("MAP_NORESERVE", MAP_NORESERVE);
    PRINT("F_ADD_SEALS", F_ADD_SEALS);
    PRINT("F_GET_SEALS", F_GET_SEALS);
    PRINT("MFD_CLOEXEC", MFD_CLOEXEC);
    PRINT("MFD_ALLOW_SEALING", MFD_ALLOW_SEALING);
    PRINT("RLIMIT_FSIZE", RLIMIT_FSIZE);
    PRINT("RLIMIT_NOFILE", RLIMIT_NOFILE);
    PRINT("RLIMIT_AS", RLIMIT_AS);
    PRINT("POLLRDHUP", POLLRDHUP);
    CALL(memfd_create), CALL(socket), CALL(socketpair), CALL(bind), CALL(listen), CALL(accept4), CALL(getsockopt);
    CALL(epoll_create1), CALL(epoll_ctl), CALL(epoll_pwait), CALL(ftruncate), CALL(fchmod), CALL(getdents64), CALL(mmap);
    CALL(getpid), CALL(tgkill), CALL(wait4), CALL(waitid), CALL(ppoll), CALL(pselect6);
    return 0;
}
